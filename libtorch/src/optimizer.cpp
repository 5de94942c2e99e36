#include "cairn/libtorch/optimizer.h"

#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <memory>
#include <sstream>
#include <unordered_map>

#include "cairn/core/error.h"
#include "cairn/libtorch/tensors.h"
#include "model_impl.h"

namespace cairn::libtorch {

namespace {

constexpr const char* kTheirs = "torch";

const Model::Impl::Shared& shared_of(const std::vector<Model*>& models, const torch::Tensor& x) {
  for (const Model* model : models) {
    const auto found = model->impl().index.find(x.unsafeGetTensorImpl());
    if (found != model->impl().index.end()) return model->impl().parameters[found->second];
  }
  core::fail<core::InvalidArgument>("TorchOptimizer",
                                    "expected parameters of the model, got one of shape ",
                                    core::str(x.sizes()), " that is none of its");
}

std::vector<optim::ParameterGroup> groups_of(const std::vector<Model*>& models,
                                             torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    core::fail<core::Unsupported>(
        "TorchOptimizer", "expected an optimizer that steps once for a gradient, got LBFGS, ",
        "which evaluates the loss again");
  }
  std::vector<optim::ParameterGroup> groups;
  for (const auto& theirs : optimizer.param_groups()) {
    optim::ParameterGroup group{{}, theirs.options().get_lr(), 0.0};
    for (const torch::Tensor& x : theirs.params()) {
      const auto& shared = shared_of(models, x);
      group.parameters.push_back({shared.name, shared.ours});
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

/// A parameter as libtorch's optimizer meets it, and so its moments: f32, the unscaled gradient
/// beside it. A half one is its master meanwhile, or a copy.
class InFull {
 public:
  InFull(torch::Tensor theirs, const kernels::UpdateEntry& entry, double scale)
      : theirs_(std::move(theirs)) {
    CAIRN_CHECK(!entry.master.defined() || entry.master.dtype == DType::f32, "TorchOptimizer",
                "expected masters in f32 (set_state_options), got ", entry.master.dtype);
    if (theirs_.scalar_type() != at::kFloat) {
      half_ = theirs_.variable_data();
      theirs_.set_data(entry.master.defined() ? to_torch(Tensor::wrap(entry.master))
                                              : half_.to(at::kFloat));
    }
    const torch::Tensor gradient = to_torch(Tensor::wrap(entry.gradient));
    torch::Tensor unscaled =
        gradient.to(at::kFloat, false, true).mul_(scale * entry.gradient_factor);
    if (entry.l2 != 0) unscaled.add_(theirs_, entry.l2);
    theirs_.mutable_grad() = std::move(unscaled);
  }
  ~InFull() {
    if (!half_.defined()) return;
    theirs_.mutable_grad().reset();
    half_.copy_(theirs_.variable_data());
    theirs_.set_data(half_);
  }
  InFull(const InFull&) = delete;
  InFull& operator=(const InFull&) = delete;

 private:
  torch::Tensor theirs_, half_;
};

/// Takes .grad of all of an optimizer's parameters, and gives it back.
class Gradients {
 public:
  explicit Gradients(torch::optim::Optimizer& optimizer) {
    for (auto& group : optimizer.param_groups()) {
      for (torch::Tensor& x : group.params()) {
        all_.emplace_back(x, std::exchange(x.mutable_grad(), {}));
      }
    }
  }
  ~Gradients() {
    for (auto& [x, gradient] : all_) x.mutable_grad() = gradient;
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> all_;
};

}  // namespace

TorchOptimizer::TorchOptimizer(Model& model, torch::optim::Optimizer& optimizer)
    : TorchOptimizer(std::vector<Model*>{&model}, optimizer) {}

TorchOptimizer::TorchOptimizer(const std::vector<Model*>& models,
                               torch::optim::Optimizer& optimizer)
    : Optimizer(groups_of(models, optimizer)), optimizer_(optimizer) {
  for (const Model* model : models) {
    if (dynamic_cast<parallel::ShardedDataParallel*>(model->impl().ddp.get()) == nullptr) continue;
    core::fail<core::Unsupported>("TorchOptimizer", "expected one of Cairn's optimizers with ",
                                  "parallel::ShardedOptions, got one of libtorch's, whose state ",
                                  "is of whole tensors");
  }
  for (const auto& theirs : optimizer.param_groups()) {
    rates_.push_back(theirs.options().get_lr());
    for (const torch::Tensor& x : theirs.params()) {
      parameters_.emplace_back(shared_of(models, x).ours, x);
    }
  }
}

/// The one that changed since they agreed counts; ours, where both did.
void TorchOptimizer::agree_on_rates() {
  auto& theirs = optimizer_.param_groups();
  for (std::size_t i = 0; i < rates_.size(); ++i) {
    double& ours = groups()[i].lr;
    if (ours == rates_[i]) ours = theirs[i].options().get_lr();
    theirs[i].options().set_lr(ours);
    rates_[i] = ours;
  }
}

void TorchOptimizer::update_group(const optim::ParameterGroup& /*group*/,
                                  const std::vector<kernels::UpdateEntry>& entries,
                                  const Call& call) {
  agree_on_rates();
  const torch::NoGradGuard no_grad;
  const Gradients as_they_are(optimizer_);
  std::unordered_map<const void*, torch::Tensor> by_memory;
  for (const auto& [ours, theirs] : parameters_) by_memory[ours.raw_data()] = theirs;
  std::vector<std::unique_ptr<InFull>> in_full;
  in_full.reserve(entries.size());
  for (const kernels::UpdateEntry& entry : entries) {
    in_full.push_back(
        std::make_unique<InFull>(by_memory.at(entry.weight.data), entry, call.gradient_scale));
  }
  optimizer_.step();
}

StateDict TorchOptimizer::state_dict() const {
  StateDict state = Optimizer::state_dict();
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  optimizer_.save(archive);
  archive.save_to(out);
  const std::string bytes = out.str();
  state.set(kTheirs, Tensor::from(std::vector<std::uint8_t>(bytes.begin(), bytes.end()),
                                  {static_cast<std::int64_t>(bytes.size())}));
  return state;
}

void TorchOptimizer::load_state_dict(const StateDict& state) {
  const auto bytes = state.tensor(kTheirs).to_vector<std::uint8_t>();
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  } catch (const c10::Error& error) {
    core::fail<core::DataError>("state",
                                "expected an optimizer's archive, got one that libtorch refuses: ",
                                error.what_without_backtrace());
  }
  StateDict rest;
  for (const auto& [key, value] : state) {
    if (key != kTheirs) rest.set(key, value);
  }
  Optimizer::load_state_dict(rest);
  optimizer_.state().clear();  // load() leaves moments that the archive has none of
  optimizer_.load(archive);
  auto& theirs = optimizer_.param_groups();
  for (std::size_t i = 0; i < rates_.size(); ++i) {
    theirs[i].options().set_lr(groups()[i].lr);
    rates_[i] = groups()[i].lr;
  }
}

}  // namespace cairn::libtorch
