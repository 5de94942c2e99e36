// A step without the host: its numbers lie on the device.
#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/optimizer_access.h"
#include "layout.h"

namespace cairn::optim {

using core::fail;
using core::Unsupported;

namespace {

Tensor number_on(Device device, double value, DType dtype) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  return Tensor::full({1}, value, dtype, device);
}

std::int64_t read(const Tensor& count) {
  return static_cast<std::int64_t>(count.item());
}

std::uint64_t address(const Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<std::uintptr_t>(tensor.raw_data()) : 0;
}

}  // namespace

std::int64_t Optimizer::steps() const {
  return capturable() ? read(device_->applied) : steps_;
}

std::int64_t Optimizer::steps_of(const Parameter& parameter) {
  return parameter.count.defined() ? read(parameter.count) : parameter.steps;
}

/// From what the host knows.
std::shared_ptr<Optimizer::DeviceState> Optimizer::make_device_state() {
  auto state = std::make_shared<DeviceState>();
  const Device device = state->device = parameters_.front().tensor.device();
  for (const Parameter& parameter : parameters_) {
    if (parameter.tensor.device() == device) continue;
    fail<Unsupported>("optimizer", "expected the parameters of a capturable optimizer on one ",
                      "device, got '", parameter.name, "' on ", parameter.tensor.device(),
                      " beside others on ", device);
  }
  std::map<std::int64_t, Tensor> counts;  // by steps
  for (Parameter& parameter : parameters_) {
    Tensor& count = counts[parameter.steps];
    const auto steps = static_cast<double>(parameter.steps);
    if (!count.defined()) count = number_on(device, steps, DType::i32);
    parameter.count = count;
  }
  for (const ParameterGroup& group : groups_) {
    state->rates.push_back(number_on(device, group.lr, DType::f64));
    state->written.push_back(group.lr);
  }
  state->found_inf = number_on(device, 0.0, DType::f32);
  state->clip = number_on(device, 1.0, DType::f64);
  state->applied = number_on(device, static_cast<double>(steps_), DType::i32);
  const auto parameters = static_cast<std::int64_t>(parameters_.size());
  state->overflowed = Tensor::zeros({parameters}, DType::f32, device);
  return state;
}

void Optimizer::set_capturable(bool value) {
  if (value == capturable()) return;
  if (!value) {
    for (Parameter& parameter : parameters_) {
      parameter.steps = steps_of(parameter);
      parameter.count = {};
    }
    steps_ = steps();
    device_ = nullptr;
    return;
  }
  if (running_norm_type() || larc_) {
    fail<Unsupported>("optimizer",
                      "expected a rule whose norms need no host to be capturable, got ",
                      larc_ ? "LARC around " : "", kind());
  }
  if (lie_elsewhere(state_options_)) {
    fail<Unsupported>("optimizer", "expected states beside their parameters for capturable steps, ",
                      "got them in files or on the host (set_state_options without a folder and ",
                      "on_host)");
  }
  device_ = make_device_state();
}

void Optimizer::check_capturable(const StepOptions& options) const {
  const auto refuse = [](const char* what) {
    fail<Unsupported>("optimizer", "expected options that a capturable step has, got ", what,
                      " (set_capturable(false))");
  };
  if (options.error_if_nonfinite) refuse("error_if_nonfinite, which the host would have to read");
  if (options.max_gradient_norm > 0 && (options.per_group_norm || options.norm_type != 2)) {
    refuse("clipping by group or by another norm than the 2-norm of all");
  }
  if (options.max_gradient_norm > 0 && own_max_norm() > 0) {
    refuse("max_gradient_norm beside a rule that clips by itself");
  }
  if (partition().cuts_any()) refuse("states that are divided among ranks");
}

/// Where the parameters moved to another device, all of it moves.
void Optimizer::write_rates() {
  const auto moved = [&](const Parameter& parameter) {
    return parameter.tensor.device() != device_->device;
  };
  if (std::any_of(parameters_.begin(), parameters_.end(), moved)) {
    set_capturable(false);
    set_capturable(true);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (device_->written[g] == groups_[g].lr) continue;
    core::refuse_in_capture("optimizer", "a learning rate that changes inside of the step");
    kernels::fill(device_->rates[g], groups_[g].lr);
    device_->written[g] = groups_[g].lr;
  }
}

/// Those of parameters with a gradient, each once. Where others share it, who has no gradient in
/// this step, they get one of their own.
std::vector<Tensor> Optimizer::stepped_counts() {
  std::set<const void*> resting;
  for (const Parameter& parameter : parameters_) {
    if (gradient_of(parameter) == nullptr) resting.insert(parameter.count.id());
  }
  std::map<const void*, Tensor> stepped;  // by the count before
  std::vector<Tensor> counts;
  for (Parameter& parameter : parameters_) {
    if (gradient_of(parameter) == nullptr) continue;
    Tensor& count = stepped[parameter.count.id()];
    if (!count.defined()) {
      count = parameter.count;
      if (resting.contains(count.id())) {
        core::refuse_in_capture("optimizer", "a step in which fewer parameters have gradients");
        count = number_on(device_->device, 0.0, DType::i32);
        kernels::copy(parameter.count, count);
      }
      counts.push_back(count);
    }
    parameter.count = count;
  }
  return counts;
}

void Optimizer::find_nonfinite(const StepOptions& options,
                               const kernels::DeviceStep& device) const {
  const TensorView none = device_->overflowed.view().slice(0, 0, 0);
  std::vector<TensorView> gradients;  // of each parameter
  for (const Parameter& parameter : parameters_) {
    const Tensor* gradient = gradient_of(parameter);
    gradients.push_back(gradient != nullptr ? gradient->view() : none);
  }
  kernels::find_nonfinite(gradients,
                          {.found_inf = device_->found_inf,
                           .each = device_->overflowed,
                           .clip = device.clip,
                           .max_norm = std::max(options.max_gradient_norm, own_max_norm()),
                           .gradient_scale = options.gradient_scale,
                           .eps = own_max_norm() > 0 ? 0.0 : 1e-6,
                           .loss_scale = device.loss_scale});
}

/// In a graph, where the host does not see whether what ranks reduced is whole: a step is skipped
/// where it is not.
void Optimizer::find_broken(bool checked, kernels::DeviceStep& device) const {
  const TensorView found = device_->found_inf;
  for (const TensorView& broken : core::broken_in_replays()) {
    if (!std::exchange(checked, true)) kernels::fill(found, 0.0);
    kernels::binary(kernels::BinaryOp::maximum, found, broken, found);
    device.found_inf = found;
  }
}

void Optimizer::update_on_device(const StepOptions& options, const kernels::DeviceStep& device) {
  core::WorkSpan span(core::ObservedWork::Kind::update, kind(), device_->device);
  show_flows(span);
  const std::vector<Tensor> counts = stepped_counts();
  std::vector<Tensor> temporaries;
  const std::vector<double> scales(groups_.size(), options.gradient_scale);
  fill_batches({}, scales, temporaries);
  apply([&] {
    for (const Tensor& count : counts) {
      kernels::advance_step(count, device.found_inf);
      has_written();
    }
    kernels::advance_step(device_->applied, device.found_inf);
    run_batches(scales, device);
  });
  tell_of_update();
}

StepResult Optimizer::step_on_device(const StepOptions& options, std::uint64_t scaler,
                                     const TensorView& loss_scale) {
  CAIRN_CHECK(capturable(), "optimizer", "expected a capturable optimizer, got another ",
              "(set_capturable(true))");
  check_scaler(scaler);
  check_capturable(options);
  prepare_gradients();
  if (!has_gradient()) return leave(kNoGradient, options);
  write_rates();
  const bool clips = options.max_gradient_norm > 0 || own_max_norm() > 0;
  kernels::DeviceStep device{.loss_scale = loss_scale};
  if (clips) device.clip = device_->clip;
  if (options.check) device.found_inf = device_->found_inf;
  if (options.check || clips) find_nonfinite(options, device);
  find_broken(options.check, device);
  update_on_device(options, device);
  finish(options);
  StepResult result;
  result.known = false;
  return result;
}

TensorView OptimizerAccess::found_inf() const {
  return optimizer_.device_->found_inf;
}

std::vector<std::string> OptimizerAccess::take_overflowed() const {
  const Tensor& overflowed = optimizer_.device_->overflowed;
  std::vector<std::string> names;
  const std::vector<double> flags = overflowed.to_vector<double>();
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0.0) names.push_back(optimizer_.parameters_[i].name);
  }
  if (!names.empty()) kernels::fill(overflowed, 0.0);
  return names;
}

void OptimizerAccess::prepare_replay() const {
  optimizer_.write_rates();
  for (const auto& parameter : optimizer_.parameters_) {
    kernels::MasterWeight::of(parameter.tensor);
  }
}

void OptimizerAccess::note_replay() const {
  std::vector<Tensor> written;
  for (const auto& parameter : optimizer_.parameters_) {
    if (parameter.tensor.requires_grad()) written.push_back(parameter.tensor);
  }
  kernels::weights_written(written);
}

void OptimizerAccess::add_fingerprint(std::vector<std::uint64_t>& words) const {
  const Optimizer::DeviceState& device = *optimizer_.device_;
  for (const auto& arena : optimizer_.arenas_) words.push_back(arena->generation());
  words.push_back(optimizer_.master_weights_);
  for (const Tensor& number : {device.found_inf, device.clip, device.applied, device.overflowed}) {
    words.push_back(address(number));
  }
  for (const Tensor& rate : device.rates) words.push_back(address(rate));
  for (const ParameterGroup& group : optimizer_.groups_) {
    words.push_back(std::bit_cast<std::uint64_t>(group.weight_decay));
    for (const auto& option : {group.beta1, group.beta2, group.eps, group.momentum}) {
      words.push_back(option ? std::bit_cast<std::uint64_t>(*option) : 0);
    }
  }
  for (const auto& parameter : optimizer_.parameters_) {
    const Tensor& tensor = parameter.tensor;
    const auto* master = kernels::MasterWeight::peek(tensor);
    const core::GradientSlot& slot = tensor.gradient_slot();
    words.insert(words.end(),
                 {address(tensor), static_cast<std::uint64_t>(tensor.dtype()),
                  address(master ? master->tensor() : Tensor()), address(slot.memory()),
                  slot.holds_gradient(), address(parameter.count), address(parameter.moments[0]),
                  address(parameter.moments[1])});
  }
}

}  // namespace cairn::optim
