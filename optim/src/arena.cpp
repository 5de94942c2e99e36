#include "cairn/optim/arena.h"

#include <algorithm>
#include <unordered_set>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::optim {

namespace {

constexpr std::int64_t kAlignment = 64;  // bytes

std::int64_t align_elements(std::int64_t elements, DType dtype) {
  const std::int64_t step = kAlignment / static_cast<std::int64_t>(core::size_of(dtype));
  return (elements + step - 1) / step * step;
}

bool has_foreign_slot(const Tensor& parameter) {
  const core::GradMeta* meta = parameter.meta_or_null();
  return meta != nullptr && meta->slot && !GradientArena::of(parameter);
}

/// Those that get a slot. Checks that each can have one.
NamedTensors eligible(const NamedTensors& parameters) {
  NamedTensors chosen;
  std::unordered_set<const void*> seen;
  for (const NamedTensor& parameter : parameters) {
    const Tensor& tensor = parameter.tensor;
    CAIRN_CHECK(tensor.defined(), "arena", "expected a tensor '", parameter.name,
                "', got an undefined one");
    CAIRN_CHECK(seen.insert(tensor.id()).second, "arena", "expected each parameter once, got '",
                parameter.name, "' twice");
    if (!tensor.requires_grad() || has_foreign_slot(tensor)) continue;
    CAIRN_CHECK(tensor.view().is_dense(), "arena", "expected dense parameters, got '",
                parameter.name, "' with shape ", tensor.shape(), " and strides ", tensor.strides());
    chosen.push_back(parameter);
  }
  return chosen;
}

/// The one arena of all; null where none has one.
std::shared_ptr<GradientArena> shared_arena(const NamedTensors& parameters) {
  if (parameters.empty()) return nullptr;
  std::shared_ptr<GradientArena> first = GradientArena::of(parameters.front().tensor);
  for (const NamedTensor& parameter : parameters) {
    const std::shared_ptr<GradientArena> arena = GradientArena::of(parameter.tensor);
    if (arena == first) continue;
    core::fail("arena", "expected parameters that share one arena or have none, got '",
               parameters.front().name, first ? "' in one and '" : "' in none and '",
               parameter.name,
               !arena  ? "' in none"
               : first ? "' in another"
                       : "' in one",
               " (attach all of them, or construct DistributedDataParallel, before the optimizers "
               "that share them out)");
  }
  return first;
}

}  // namespace

std::shared_ptr<GradientArena> GradientArena::of(const Tensor& parameter) {
  const core::GradMeta* meta = parameter.meta_or_null();
  return meta == nullptr ? nullptr : std::static_pointer_cast<GradientArena>(meta->arena.lock());
}

std::shared_ptr<GradientArena> GradientArena::attach(const NamedTensors& parameters,
                                                     bool f32_slots) {
  NamedTensors chosen = eligible(parameters);
  if (std::shared_ptr<GradientArena> arena = shared_arena(chosen)) {
    CAIRN_CHECK(arena->f32_slots_ || !f32_slots, "arena", "expected an arena with f32 slots, got '",
                chosen.front().name, "' in one without (attach with f32_slots first)");
    if (arena->stale()) arena->refresh();
    return arena;
  }
  std::shared_ptr<GradientArena> arena(new GradientArena(std::move(chosen), f32_slots));
  for (const NamedTensor& parameter : arena->parameters_) parameter.tensor.meta().arena = arena;
  arena->lay_out();
  return arena;
}

GradientArena::GradientArena(NamedTensors parameters, bool f32_slots)
    : parameters_(std::move(parameters)), f32_slots_(f32_slots) {}

GradientArena::~GradientArena() {
  release_slots();
}

bool GradientArena::holds_slot_of(const Tensor& parameter) const {
  const std::shared_ptr<core::Storage>& slot = parameter.meta().slot;
  return slot && std::any_of(buffers_.begin(), buffers_.end(),
                             [&](const Buffer& buffer) { return buffer.data.storage() == slot; });
}

bool GradientArena::stale() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const NamedTensor& parameter) {
    return parameter.tensor.requires_grad() != holds_slot_of(parameter.tensor);
  });
}

/// Written gradients become tensors of their own (still in the old buffer's memory).
void GradientArena::release_slots() {
  for (const NamedTensor& parameter : parameters_) {
    core::GradMeta& meta = parameter.tensor.meta();
    if (!holds_slot_of(parameter.tensor)) continue;
    if (!meta.grad_written) meta.grad = nullptr;
    meta.slot = nullptr;
    meta.grad_written = false;
  }
}

void GradientArena::refresh() {
  release_slots();
  lay_out();
}

void GradientArena::lay_out() {
  struct Plan {
    Device device;
    DType dtype;
    std::int64_t elements = 0;
    std::vector<Slot> slots;
  };
  std::vector<Plan> plans;
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    const Tensor& tensor = parameters_[i].tensor;
    if (!tensor.requires_grad()) continue;
    const DType dtype = f32_slots_ && core::is_half(tensor.dtype()) ? DType::f32 : tensor.dtype();
    auto plan = std::find_if(plans.begin(), plans.end(), [&](const Plan& p) {
      return p.device == tensor.device() && p.dtype == dtype;
    });
    if (plan == plans.end()) plan = plans.insert(plan, Plan{tensor.device(), dtype, 0, {}});
    plan->slots.push_back({i, plan->elements, tensor.numel()});
    plan->elements = align_elements(plan->elements + tensor.numel(), dtype);
  }

  buffers_.clear();
  const core::MemoryCategoryGuard category(core::MemoryCategory::gradients);
  for (Plan& plan : plans) {
    Buffer buffer{Tensor::zeros({plan.elements}, plan.dtype, plan.device), std::move(plan.slots)};
    for (const Slot& slot : buffer.slots) {
      const Tensor& parameter = parameters_[slot.parameter].tensor;
      const TensorView start = buffer.data.view().slice(0, slot.offset, slot.offset + slot.numel);
      const TensorView place(start.data, parameter.shape(), parameter.strides(), plan.dtype,
                             plan.device);
      core::GradMeta& meta = parameter.meta();
      const Tensor former = parameter.grad();
      if (former.defined()) kernels::copy(former, place);
      meta.slot = buffer.data.storage();
      meta.grad = std::make_shared<Tensor>(buffer.data.alias(place));
      meta.grad_written = former.defined();
    }
    buffers_.push_back(std::move(buffer));
  }
  ++generation_;
}

void GradientArena::clear() {
  for (const NamedTensor& parameter : parameters_) Tensor(parameter.tensor).clear_grad();
}

void GradientArena::zero_unwritten(const Buffer& buffer, std::size_t first_slot,
                                   std::size_t last_slot) {
  for (std::size_t i = first_slot; i < last_slot; ++i) {
    core::GradMeta& meta = parameters_[buffer.slots[i].parameter].tensor.meta();
    if (meta.grad_written) continue;
    kernels::fill(*meta.grad, 0.0);
    meta.grad_written = true;
  }
}

NamedTensor wrap_parameter(std::string name, const TensorView& weight, const TensorView& gradient,
                           std::shared_ptr<void> owner) {
  CAIRN_CHECK(weight.shape == gradient.shape && weight.device == gradient.device, "wrap_parameter",
              "expected a weight and a gradient of one shape and device for '", name, "', got ",
              weight.shape, " on ", weight.device, " and ", gradient.shape, " on ",
              gradient.device);
  CAIRN_CHECK(core::is_half(gradient.dtype) || gradient.dtype == DType::f32, "wrap_parameter",
              "expected a gradient of f16, bf16 or f32 for '", name, "', got ", gradient.dtype);
  Tensor parameter = Tensor::wrap(weight, owner);
  parameter.set_requires_grad(true);
  core::GradMeta& meta = parameter.meta();
  meta.name = name;
  meta.grad = std::make_shared<Tensor>(Tensor::wrap(gradient, std::move(owner)));
  meta.slot = meta.grad->storage();
  meta.grad_written = true;
  return {std::move(name), std::move(parameter)};
}

}  // namespace cairn::optim
