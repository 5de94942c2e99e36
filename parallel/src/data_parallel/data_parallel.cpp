#include "cairn/parallel/data_parallel.h"

#include <algorithm>
#include <utility>

#include "cairn/autograd/ops.h"
#include "data_parallel/replicas.h"
#include "data_parallel/workers.h"

namespace cairn::parallel {

using autograd::Reduction;

namespace {

void check_batch(const char* op, const char* what, const Tensor& x) {
  CAIRN_CHECK(x.defined() && x.dims() > 0, op, "expected ", what, " [N, ...], got ",
              x.defined() ? core::str(x.shape()) : "an undefined tensor");
}

/// Samples [begin, end) of x on the device.
Tensor rows(const Tensor& x, std::int64_t begin, std::int64_t end, Device device) {
  const bool all = begin == 0 && end == x.size(0);
  return autograd::to(all ? x : autograd::slice(x, 0, begin, end), device);
}

/// All devices of the kind that the model lies on, where none are given.
std::vector<Device> devices_or_all(const nn::Module& model, std::vector<Device> devices) {
  if (!devices.empty()) return devices;
  const auto parameters = model.parameters();
  const auto type =
      parameters.empty() ? core::DeviceType::cpu : parameters.front().tensor.device().type;
  for (int i = 0; i < core::device_count(type); ++i) devices.push_back({type, i});
  return devices;
}

}  // namespace

std::vector<Tensor> scatter(const Tensor& x, const std::vector<Device>& devices) {
  check_batch("scatter", "x", x);
  CAIRN_CHECK(!devices.empty(), "scatter", "expected at least one device, got none");
  const std::int64_t n = x.size(0), count = static_cast<std::int64_t>(devices.size());
  const std::int64_t each = std::max<std::int64_t>((n + count - 1) / count, 1);
  std::vector<Tensor> parts{rows(x, 0, std::min(each, n), devices[0])};
  for (std::int64_t at = each; at < n; at += each) {
    parts.push_back(rows(x, at, std::min(at + each, n), devices[parts.size()]));
  }
  return parts;
}

Tensor gather(const std::vector<Tensor>& parts, Device device) {
  CAIRN_CHECK(!parts.empty(), "gather", "expected at least one part, got none");
  std::vector<Tensor> here;
  for (const Tensor& part : parts) {
    CAIRN_CHECK(part.defined(), "gather", "expected tensors, got an undefined one");
    const Tensor moved = autograd::to(part, device);
    here.push_back(part.dims() == 0 ? autograd::reshape(moved, {1}) : moved);
  }
  return here.size() == 1 ? here[0] : autograd::concat(here, 0);
}

std::vector<Tensor> gather(const std::vector<std::vector<Tensor>>& parts, Device device) {
  CAIRN_CHECK(!parts.empty(), "gather", "expected at least one part, got none");
  std::vector<Tensor> outputs;
  for (std::size_t k = 0; k < parts[0].size(); ++k) {
    std::vector<Tensor> of_output;
    for (const std::vector<Tensor>& part : parts) {
      CAIRN_CHECK(part.size() == parts[0].size(), "gather", "expected ", parts[0].size(),
                  " outputs of each part, got ", part.size());
      of_output.push_back(part[k]);
    }
    outputs.push_back(gather(of_output, device));
  }
  return outputs;
}

struct DataParallelModel::Impl {
  Impl(nn::Module& model, std::vector<Device> devices) : replicas(model, std::move(devices)) {}
  Replicas replicas;
  Workers workers;
};

DataParallelModel::DataParallelModel(nn::Module& model, std::vector<Device> devices)
    : impl_(std::make_unique<Impl>(model, devices_or_all(model, std::move(devices)))) {}
DataParallelModel::~DataParallelModel() = default;
DataParallelModel::DataParallelModel(DataParallelModel&&) noexcept = default;
DataParallelModel& DataParallelModel::operator=(DataParallelModel&&) noexcept = default;

const std::vector<Device>& DataParallelModel::devices() const {
  return impl_->replicas.devices();
}
nn::Module& DataParallelModel::module() const {
  return impl_->replicas.model();
}

std::vector<Tensor> DataParallelModel::operator()(const Tensor& x) {
  return apply(
      {x}, [](nn::Module& replica, const std::vector<Tensor>& part) { return replica(part[0]); });
}

void DataParallelModel::run(
    const std::vector<Tensor>& inputs, const std::function<void(std::size_t parts)>& begin,
    const std::function<void(std::size_t, nn::Module&, const std::vector<Tensor>&)>& work) {
  CAIRN_CHECK(!inputs.empty(), "data_parallel", "expected at least one input, got none");
  std::vector<std::vector<Tensor>> parts;  // [part][input]
  for (const Tensor& input : inputs) {
    check_batch("data_parallel", "an input", input);
    CAIRN_CHECK(input.size(0) == inputs[0].size(0), "data_parallel",
                "expected inputs of the same N, got ", inputs[0].shape(), " and ", input.shape());
    const std::vector<Tensor> scattered = scatter(input, devices());
    parts.resize(scattered.size());
    for (std::size_t i = 0; i < scattered.size(); ++i) parts[i].push_back(scattered[i]);
  }
  impl_->replicas.follow_model(parts.size());
  begin(parts.size());
  const auto used = devices().begin() + static_cast<std::ptrdiff_t>(parts.size());
  impl_->workers.run({devices().begin(), used},
                     [&](std::size_t i) { work(i, impl_->replicas.at(i), parts[i]); });
}

DataParallel::DataParallel(nn::Module& model, std::vector<Device> devices)
    : model_(model, std::move(devices)), output_device_(model_.devices()[0]) {}

DataParallel::DataParallel(nn::Module& model, std::vector<Device> devices, Device output_device)
    : model_(model, std::move(devices)), output_device_(output_device) {
  core::check_exists(output_device);
}

struct DataParallelCriterion::Impl {
  Loss loss;
  DataParallelCriterionOptions options;
  Workers workers;

  std::vector<Tensor> losses_of(const std::vector<Tensor>& outputs,
                                const std::vector<Tensor>& targets);
  std::vector<double> weights_of(const std::vector<Tensor>& targets) const;
};

DataParallelCriterion::DataParallelCriterion(Loss loss, DataParallelCriterionOptions options)
    : impl_(std::make_unique<Impl>(Impl{std::move(loss), std::move(options), {}})) {
  CAIRN_CHECK(impl_->loss, "data_parallel_criterion", "expected a loss function, got none");
}
DataParallelCriterion::~DataParallelCriterion() = default;
DataParallelCriterion::DataParallelCriterion(DataParallelCriterion&&) noexcept = default;
DataParallelCriterion& DataParallelCriterion::operator=(DataParallelCriterion&&) noexcept = default;

std::vector<Tensor> DataParallelCriterion::Impl::losses_of(const std::vector<Tensor>& outputs,
                                                           const std::vector<Tensor>& targets) {
  std::vector<Device> devices;
  devices.reserve(outputs.size());
  for (const Tensor& output : outputs) devices.push_back(output.device());
  std::vector<Tensor> losses(outputs.size());
  workers.run(devices, [&](std::size_t i) { losses[i] = loss(outputs[i], targets[i]); });
  for (const Tensor& value : losses) {
    const bool fits =
        value.defined() && (options.reduction == Reduction::none || value.numel() == 1);
    CAIRN_CHECK(fits, "data_parallel_criterion", "expected one loss of each part, got ",
                value.defined() ? core::str(value.shape()) : "an undefined tensor",
                " (reduction none gathers many)");
  }
  return losses;
}

/// What each part's loss counts for in the sum; 0: nothing.
std::vector<double> DataParallelCriterion::Impl::weights_of(
    const std::vector<Tensor>& targets) const {
  if (options.reduction == Reduction::sum) return std::vector<double>(targets.size(), 1.0);
  std::vector<double> weights;
  double total = 0.0;
  for (const Tensor& target : targets) {
    weights.push_back(options.count ? options.count(target) : static_cast<double>(target.size(0)));
    total += weights.back();
  }
  for (double& weight : weights) weight = total > 0.0 ? weight / total : 0.0;
  if (total == 0.0) weights[0] = 1.0;  // a mean of nothing is what the loss makes of it
  return weights;
}

Tensor DataParallelCriterion::operator()(const std::vector<Tensor>& outputs, const Tensor& target) {
  constexpr const char* op = "data_parallel_criterion";
  check_batch(op, "a target", target);
  std::int64_t total = 0, before = 0;
  for (const Tensor& output : outputs) {
    check_batch(op, "outputs", output);
    total += output.size(0);
  }
  const std::int64_t samples = target.size(0);
  std::vector<Tensor> targets;
  for (const Tensor& output : outputs) {
    const std::int64_t after = before + output.size(0), whole = std::max<std::int64_t>(total, 1);
    CAIRN_CHECK(samples * after % whole == 0 && (total > 0 || samples == 0), op,
                "expected a target that can be cut like the outputs, of ", total, " in all, got ",
                target.shape());
    targets.push_back(
        rows(target, samples * before / whole, samples * after / whole, output.device()));
    before = after;
  }
  return (*this)(outputs, targets);
}

Tensor DataParallelCriterion::operator()(const std::vector<Tensor>& outputs,
                                         const std::vector<Tensor>& targets) {
  constexpr const char* op = "data_parallel_criterion";
  CAIRN_CHECK(!outputs.empty() && outputs.size() == targets.size(), op,
              "expected as many targets as outputs, one at least, got ", targets.size(), " and ",
              outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_batch(op, "outputs", outputs[i]);
    check_batch(op, "targets", targets[i]);
  }
  const std::vector<Tensor> losses = impl_->losses_of(outputs, targets);
  const Device device = outputs[0].device();
  if (impl_->options.reduction == Reduction::none) return gather(losses, device);
  const std::vector<double> weights = impl_->weights_of(targets);
  Tensor sum;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (weights[i] == 0.0) continue;
    const Tensor share = weights[i] == 1.0 ? losses[i] : autograd::affine(losses[i], weights[i], 0);
    const Tensor here = autograd::to(share, device);
    sum = sum.defined() ? autograd::add(sum, here) : here;
  }
  return sum;
}

}  // namespace cairn::parallel
