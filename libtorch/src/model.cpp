#include "cairn/libtorch/model.h"

#include <torch/csrc/autograd/variable.h>

#include "backward.h"
#include "cairn/core/error.h"
#include "cairn/libtorch/tensors.h"
#include "model_impl.h"

namespace cairn::libtorch {

namespace {

class OnGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  OnGradient(Model::Impl& model, std::size_t parameter) : model_(model), parameter_(parameter) {}
  void operator()(const torch::Tensor&) override { model_.on_gradient(parameter_); }

 private:
  Model::Impl& model_;
  std::size_t parameter_;
};

/// Each of Cairn's tensors beside the one of libtorch that shares its memory.
std::vector<Model::Impl::Shared> shared_of(const NamedTensors& ours, const KnownTensors& known,
                                           const torch::nn::Module& module) {
  std::unordered_map<const void*, const at::TensorImpl*> theirs;
  for (const auto& [impl, tensor] : known) theirs[tensor.id()] = impl;
  std::unordered_map<const at::TensorImpl*, torch::Tensor> handles;
  for (const auto& x : module.parameters()) handles[x.unsafeGetTensorImpl()] = x;
  for (const auto& x : module.buffers()) handles[x.unsafeGetTensorImpl()] = x;
  std::vector<Model::Impl::Shared> all;
  for (const auto& [name, tensor] : ours) {
    const torch::Tensor& handle = handles.at(theirs.at(tensor.id()));
    all.push_back({name, handle, tensor, static_cast<std::uint32_t>(handle._version()),
                   tensor.storage()->version()});
  }
  return all;
}

/// In place of a gradient that ranks divide: its shape, and no elements. Whoever reads or writes
/// these gets an error of libtorch's (a write, because they all are one); who drops it is followed.
torch::Tensor without_elements(const torch::Tensor& like) {
  return torch::empty({}, like.options().device(torch::kMeta)).expand(like.sizes());
}

class FlagGuard {
 public:
  explicit FlagGuard(bool& flag) : flag_(flag), before_(std::exchange(flag, true)) {}
  ~FlagGuard() { flag_ = before_; }
  FlagGuard(const FlagGuard&) = delete;
  FlagGuard& operator=(const FlagGuard&) = delete;

 private:
  bool& flag_;
  bool before_;
};

}  // namespace

Model::Impl::Impl(torch::nn::Module& theirs, const Wrap& wrap)
    : module(theirs),
      mirror(theirs, known),
      parameters(shared_of(mirror.parameters(), known, theirs)),
      buffers(shared_of(mirror.buffers(), known, theirs)) {
  for (const Shared& parameter : parameters) {
    CAIRN_CHECK(!torch::autograd::impl::post_acc_grad_hooks(parameter.theirs), "libtorch",
                "expected parameters of one Model, got '", parameter.name,
                "' that another one (or a hook) waits for");
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    index[parameters[i].theirs.unsafeGetTensorImpl()] = i;
  }
  arena = optim::GradientArena::attach(mirror.parameters());
  if (wrap) ddp = wrap(mirror);
  for (const Shared& parameter : parameters) {
    watching.push_back(autograd::on_gradient_ready(parameter.ours, [this](const Tensor& leaf) {
      CAIRN_CHECK(sees_gradients, "libtorch", "expected a backward that the Model sees for '",
                  leaf.name(), "', got autograd::backward() (precision.backward(join.zero()), or ",
                  "model.backward(join.zero()) without amp)");
    }));
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {  // last: nothing throws any more
    torch::autograd::impl::set_post_acc_grad_hooks(parameters[i].theirs,
                                                   std::make_unique<OnGradient>(*this, i));
  }
}

Model::Impl::~Impl() {
  for (const Shared& parameter : parameters) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.theirs, nullptr);
  }
}

void Model::Impl::follow_cairn() {
  const torch::NoGradGuard no_grad;
  for (auto* list : {&parameters, &buffers}) {
    for (Shared& shared : *list) {
      if (shared.theirs.data_ptr() == shared.ours.raw_data()) continue;
      shared.theirs.mutable_grad().reset();
      shared.shows_gradient = false;
      shared.theirs.set_data(to_torch(shared.ours));
    }
  }
}

void Model::Impl::follow_changes() {
  for (auto* list : {&parameters, &buffers}) {
    for (Shared& shared : *list) {
      CAIRN_CHECK(shared.theirs.data_ptr() == shared.ours.raw_data(), "libtorch",
                  "expected the memory of '", shared.name, "' to stay where it was, got other ",
                  "memory (move or cast the module before its Model is made)");
      const auto version = static_cast<std::uint32_t>(shared.theirs._version());
      if (std::exchange(shared.version, version) == version) continue;
      const bool known = shared.written == shared.ours.storage()->version();
      shared.ours.storage()->bump_version();
      if (known) shared.written = shared.ours.storage()->version();
    }
  }
  for (Shared& parameter : parameters) {
    if (parameter.ours.requires_grad() != parameter.theirs.requires_grad()) {
      parameter.ours.set_requires_grad(parameter.theirs.requires_grad());
    }
    if (parameter.shows_gradient && !parameter.theirs.grad().defined()) {  // zero_grad()
      parameter.ours.clear_grad();
      parameter.shows_gradient = false;
    }
  }
}

void Model::Impl::pull_foreign_changes() {
  follow_changes();
  writes.check(parameters_waiting());
}

void Model::Impl::push_changes() {
  note_written();
  place_gradients();
  writes.forget();
}

void Model::Impl::note_written() {
  for (Shared& parameter : parameters) {
    const std::uint64_t version = parameter.ours.storage()->version();
    if (std::exchange(parameter.written, version) == version) continue;
    parameter.theirs.unsafeGetTensorImpl()->bump_version();
    parameter.version = static_cast<std::uint32_t>(parameter.theirs._version());
  }
}

void Model::Impl::place_gradients() {
  for (Shared& parameter : parameters) {
    const core::GradientSlot& slot = parameter.ours.gradient_slot();
    torch::Tensor& gradient = parameter.theirs.mutable_grad();
    const bool broken = slot.state() == core::GradientSlot::State::broken;  // zero_grad() mends it
    const bool in_slot = slot.memory().defined() && (slot.holds_gradient() || broken);
    const bool in_sum = slot.state() == core::GradientSlot::State::empty && slot.has_sum();
    const Tensor shown = in_slot ? slot.memory() : in_sum ? slot.sum() : Tensor();
    const bool divided = broken ? !slot.placed() : (in_slot || in_sum) && slot.holds_part();
    if (divided) {
      if (!gradient.defined() || !gradient.is_meta()) gradient = without_elements(parameter.theirs);
    } else if (!shown.defined()) {
      gradient.reset();
    } else if (!gradient.defined() || gradient.data_ptr() != shown.raw_data()) {
      gradient = to_torch(shown);
    }
    parameter.shows_gradient = gradient.defined();
  }
}

/// Parameters whose gradients wait for a step.
std::vector<SharedWrites::Parameter> Model::Impl::parameters_waiting() const {
  std::vector<SharedWrites::Parameter> waiting;
  for (const Shared& parameter : parameters) {
    if (!parameter.shows_gradient) continue;
    const core::GradientSlot& slot = parameter.ours.gradient_slot();
    if (slot.state() == core::GradientSlot::State::broken) continue;
    if (slot.holds_gradient()) {
      waiting.push_back({parameter.name, parameter.ours, slot.memory(), slot.scale().factor,
                         slot.has_sum(), slot.holds_part(), parameter.theirs.grad()._version()});
    } else if (slot.has_sum()) {
      waiting.push_back({parameter.name, parameter.ours, slot.sum(), 1.0, false, slot.holds_part(),
                         slot.holds_part() ? parameter.theirs.grad()._version() : 0});
    }
  }
  return waiting;
}

void Model::Impl::on_gradient(std::size_t i) {
  Shared& parameter = parameters[i];
  torch::Tensor& gradient = parameter.theirs.mutable_grad();
  const FlagGuard knows(sees_gradients);  // of another Model's backward too
  const Tensor slot = land_gradient(parameter.ours, gradient);
  if (!parameter.ours.gradient_slot().placed()) {
    gradient.reset();  // ranks divide it: nobody keeps the whole beside its bucket
  } else if (gradient.data_ptr() != slot.raw_data()) {
    gradient = to_torch(slot);
  }
  parameter.shows_gradient = gradient.defined();
}

Model::Model(torch::nn::Module& module) : impl_(std::make_shared<Impl>(module, nullptr)) {
  impl_->arena->share(impl_);
}

Model::Model(torch::nn::Module& module, const parallel::ProcessGroup& group,
             const parallel::DistributedOptions& options)
    : impl_(std::make_shared<Impl>(module, [&](nn::Module& mirror) {
        return std::make_unique<parallel::DistributedDataParallel>(mirror, group, options);
      })) {
  impl_->arena->share(impl_);
}

Model::Model(torch::nn::Module& module, const parallel::ProcessGroup& group,
             const parallel::ShardedOptions& options)
    : impl_(std::make_shared<Impl>(module, [&](nn::Module& mirror) {
        if (options.stage == parallel::ZeroStage::parameters) {
          core::fail<core::Unsupported>(
              "libtorch", "expected ZeroStage::optimizer_states or gradients, got parameters ",
              "(a torch::nn::Module has no hook that could gather weights where they are used; ",
              "modules of cairn::nn have stage 3; StateOptions::folder and libtorch::checkpoint ",
              "take less here)");
        }
        return std::make_unique<parallel::ShardedDataParallel>(mirror, group, options);
      })) {
  impl_->arena->share(impl_);
}

Model::~Model() = default;

NamedTensors Model::parameters() const {
  return impl_->mirror.parameters();
}

NamedTensors Model::buffers() const {
  return impl_->mirror.buffers();
}

core::World Model::world() const {
  return impl_->ddp ? impl_->ddp->world() : core::World();
}

nn::Module& Model::module() {
  return impl_->mirror;
}

parallel::DistributedDataParallel* Model::ddp() {
  impl_->follow_changes();
  return impl_->ddp ? &*impl_->ddp : nullptr;
}

std::optional<parallel::DistributedDataParallel::NoSync> Model::no_sync(bool enabled) {
  if (!impl_->ddp) return std::nullopt;
  return impl_->ddp->no_sync(enabled);
}

StateDict Model::state_dict() const {
  impl_->follow_changes();
  return impl_->mirror.state_dict();
}

void Model::load_state_dict(const StateDict& state) {
  impl_->follow_changes();
  impl_->mirror.load_state_dict(state);
  impl_->follow_cairn();
  impl_->push_changes();
}

/// DDP hears that a forward begins, and its first sample, which tells ranks that read the same
/// batch.
std::unique_ptr<AutocastGuard> Model::begin_forward(const torch::Tensor& first) {
  impl_->follow_changes();
  if (impl_->ddp) {
    impl_->mirror.train(impl_->module.is_training());
    const bool samples = first.defined() && first.dim() > 0;
    (*impl_->ddp)(samples ? to_cairn(first.detach().slice(0, 0, 1)) : Tensor::zeros({1}));
  }
  return region();
}

std::unique_ptr<AutocastGuard> Model::region() const {
  const std::optional<amp::Options>& precision = impl_->precision;
  if (!precision || !precision->enabled || !precision->autocast.value_or(false)) return nullptr;
  const auto device =
      impl_->parameters.empty() ? c10::kCPU : impl_->parameters.front().theirs.device().type();
  return std::make_unique<AutocastGuard>(device, to_torch(precision->half_dtype));
}

namespace {
torch::Tensor cast_floating(const torch::Tensor& x, std::optional<DType> dtype) {
  return dtype && x.defined() && x.is_floating_point() ? x.to(to_torch(*dtype)) : x;
}
}  // namespace

torch::Tensor Model::cast_input(const torch::Tensor& x) const {
  const auto& precision = impl_->precision;
  return precision && precision->enabled ? cast_floating(x, precision->cast_model_type) : x;
}

torch::Tensor Model::cast_output(const torch::Tensor& x) const {
  const auto& precision = impl_->precision;
  return precision && precision->enabled ? cast_floating(x, precision->cast_model_outputs) : x;
}

}  // namespace cairn::libtorch
