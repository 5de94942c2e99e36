#include "cairn/gradients/arena.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"

namespace cairn::gradients {

namespace {

constexpr std::int64_t kAlignment = 64;  // bytes

std::int64_t align_elements(std::int64_t elements, DType dtype) {
  const std::int64_t step = kAlignment / static_cast<std::int64_t>(core::size_of(dtype));
  return (elements + step - 1) / step * step;
}

bool has_foreign_slot(const Tensor& parameter) {
  const core::GradientSlot* slot = parameter.gradient_slot_or_null();
  return slot != nullptr && slot->placed() && !slot->owner();
}

/// Those that belong to an arena. Checks that each can.
NamedTensors eligible(const NamedTensors& parameters) {
  NamedTensors chosen;
  std::unordered_set<const void*> seen;
  for (const NamedTensor& parameter : parameters) {
    const Tensor& tensor = parameter.tensor;
    CAIRN_CHECK(tensor.defined(), "arena", "expected a tensor '", parameter.name,
                "', got an undefined one");
    CAIRN_CHECK(seen.insert(tensor.id()).second, "arena", "expected each parameter once, got '",
                parameter.name, "' twice");
    if (has_foreign_slot(tensor) || !core::is_floating(tensor.dtype())) continue;
    CAIRN_CHECK(tensor.is_contiguous() || tensor.view().is_dense(), "arena",
                "expected dense parameters, got '", parameter.name, "' with shape ", tensor.shape(),
                " and strides ", tensor.strides());
    chosen.push_back(parameter);
  }
  return chosen;
}

}  // namespace

std::shared_ptr<GradientArena> GradientArena::of(const Tensor& parameter) {
  const core::GradientSlot* slot = parameter.gradient_slot_or_null();
  return slot == nullptr ? nullptr : std::dynamic_pointer_cast<GradientArena>(slot->owner());
}

std::shared_ptr<GradientArena> GradientArena::attach(const NamedTensors& parameters, bool f32_slots,
                                                     std::weak_ptr<const void> without_buffers) {
  const NamedTensors chosen = eligible(parameters);
  std::shared_ptr<GradientArena> arena;
  for (const NamedTensor& parameter : chosen) {
    if (!arena) arena = of(parameter.tensor);
  }
  if (!arena) arena.reset(new GradientArena());
  arena->f32_slots_ = arena->f32_slots_ || f32_slots;
  if (arena->has_buffers()) arena->without_buffers_ = std::move(without_buffers);
  arena->take_in(chosen);
  arena->order_like(chosen);
  if (f32_slots) arena->use_f32_slots();
  if (arena->stale()) arena->refresh();
  return arena;
}

/// Appends those that it lacks; an arena that one of them comes from gives up all of its
/// parameters.
void GradientArena::take_in(const NamedTensors& parameters) {
  NamedTensors more;
  for (const NamedTensor& parameter : parameters) {
    const std::shared_ptr<GradientArena> other = of(parameter.tensor);
    if (other.get() == this) continue;
    if (!other) {
      parameter.tensor.gradient_slot().set_owner(weak_from_this());
      more.push_back(parameter);
      continue;
    }
    other->displace_slots();
    for (const NamedTensor& moved : std::exchange(other->parameters_, {})) {
      moved.tensor.gradient_slot().set_owner(weak_from_this());
      more.push_back(moved);
    }
    other->buffers_.clear();
    shared_.insert(shared_.end(), other->shared_.begin(), other->shared_.end());
    other->shared_.clear();
    ++other->generation_;
    f32_slots_ = f32_slots_ || other->f32_slots_;
    if (has_buffers()) without_buffers_ = other->without_buffers_;
  }
  if (more.empty()) return;
  parameters_.insert(parameters_.end(), more.begin(), more.end());
  refresh();
}

/// The order of registration of all of them, whoever attached some before: so that the layout does
/// not depend on who came first.
void GradientArena::order_like(const NamedTensors& parameters) {
  if (parameters.size() != parameters_.size()) return;
  const auto same = [](const NamedTensor& a, const NamedTensor& b) {
    return a.tensor.same(b.tensor);
  };
  if (std::equal(parameters.begin(), parameters.end(), parameters_.begin(), same)) return;
  parameters_ = parameters;
  refresh();
}

GradientArena::~GradientArena() {
  displace_slots();
}

bool GradientArena::holds_slot_of(const Tensor& parameter) const {
  const core::GradientSlot& slot = parameter.gradient_slot();
  if (!slot.placed()) return false;
  const auto& storage = slot.memory().storage();
  return std::any_of(buffers_.begin(), buffers_.end(),
                     [&](const Buffer& buffer) { return buffer.data.storage() == storage; });
}

std::vector<GradientArena::Layout> GradientArena::layouts() const {
  std::vector<Layout> all;
  all.reserve(parameters_.size());
  for (const auto& [name, tensor] : parameters_)
    all.push_back({tensor.device(), gradient_dtype(tensor), tensor.requires_grad()});
  return all;
}

DType GradientArena::gradient_dtype(const Tensor& parameter) const {
  return f32_slots_ && core::is_half(parameter.dtype()) ? DType::f32 : parameter.dtype();
}

bool GradientArena::stale() const {
  if (!has_buffers()) return layouts() != laid_out_;
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const NamedTensor& parameter) {
    return parameter.tensor.requires_grad() != holds_slot_of(parameter.tensor);
  });
}

bool GradientArena::would_add_to_half() const {
  if (f32_slots_ || !accumulate_in_f32_) return false;
  return std::any_of(parameters_.begin(), parameters_.end(), [](const NamedTensor& parameter) {
    const core::GradientSlot& slot = parameter.tensor.gradient_slot();
    return parameter.tensor.requires_grad() && slot.holds_gradient() &&
           core::is_half(slot.memory().dtype());
  });
}

void GradientArena::begin(core::RunId run) {
  if (std::exchange(last_run_, run) == run) return;
  if (would_add_to_half()) return use_f32_slots();
  if (stale()) refresh();
}

void GradientArena::use_f32_slots() {
  const bool half_slots = std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) {
    return core::is_half(buffer.data.dtype());
  });
  f32_slots_ = true;
  if (half_slots || (!has_buffers() && stale())) refresh();
}

/// Gradients become tensors of their own (still in the old buffer's memory).
void GradientArena::displace_slots() {
  for (const NamedTensor& parameter : parameters_) {
    if (holds_slot_of(parameter.tensor)) parameter.tensor.gradient_slot().displace();
  }
}

void GradientArena::refresh() {
  displace_slots();
  lay_out();
}

void GradientArena::lay_out() {
  ++generation_;
  buffers_.clear();
  if (!has_buffers()) return lay_out_alone();
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
    const DType dtype = gradient_dtype(tensor);
    auto plan = std::find_if(plans.begin(), plans.end(), [&](const Plan& p) {
      return p.device == tensor.device() && p.dtype == dtype;
    });
    if (plan == plans.end()) plan = plans.insert(plan, Plan{tensor.device(), dtype, 0, {}});
    plan->slots.push_back({i, plan->elements, tensor.numel()});
    plan->elements = align_elements(plan->elements + tensor.numel(), dtype);
  }

  const core::MemoryCategoryGuard category(core::MemoryCategory::gradients);
  for (Plan& plan : plans) {
    Buffer buffer{Tensor::zeros({plan.elements}, plan.dtype, plan.device), std::move(plan.slots)};
    for (const Slot& slot : buffer.slots) {
      const Tensor& parameter = parameters_[slot.parameter].tensor;
      if (parameter.gradient_slot().holds_part()) continue;  // it comes when that is gone
      const TensorView start = buffer.data.view().slice(0, slot.offset, slot.offset + slot.numel);
      const TensorView place(start.data, parameter.shape(), parameter.strides(), plan.dtype,
                             plan.device);
      const Tensor former = parameter.gradient_slot().gradient();
      if (former.defined()) kernels::copy(former, place);
      parameter.gradient_slot().place(buffer.data.alias(place));
    }
    buffers_.push_back(std::move(buffer));
  }
}

/// Without buffers: whole gradients turn to the dtype of their slots; parts go as they are.
void GradientArena::lay_out_alone() {
  for (const auto& [name, tensor] : parameters_) {
    core::GradientSlot& slot = tensor.gradient_slot();
    const Tensor former = slot.holds_part() ? Tensor() : slot.gradient();
    if (!former.defined() || former.dtype() == gradient_dtype(tensor)) continue;
    const Tensor wide = kernels::empty_with_layout_of(tensor, gradient_dtype(tensor),
                                                      core::MemoryCategory::gradients);
    kernels::copy(former, wide);
    slot.place(wide);
    slot.displace();
  }
  laid_out_ = layouts();
}

void GradientArena::clear() {
  for (const NamedTensor& parameter : parameters_) Tensor(parameter.tensor).clear_grad();
}

void GradientArena::pull_foreign_changes() const {
  for (const auto& shared : shared_) {
    if (const auto theirs = shared.lock()) theirs->pull_foreign_changes();
  }
}

void GradientArena::push_changes() const {
  for (const auto& shared : shared_) {
    if (const auto theirs = shared.lock()) theirs->push_changes();
  }
}

bool has_optimizer(const Tensor& parameter) {
  return !parameter.gradient_slot().claim(std::make_shared<char>());  // which ends at once
}

NamedTensor wrap_parameter(std::string name, Tensor weight, Tensor gradient) {
  CAIRN_CHECK(weight.shape() == gradient.shape() && weight.device() == gradient.device(),
              "wrap_parameter", "expected a weight and a gradient of one shape and device for '",
              name, "', got ", weight.shape(), " on ", weight.device(), " and ", gradient.shape(),
              " on ", gradient.device());
  CAIRN_CHECK(core::is_half(gradient.dtype()) || gradient.dtype() == DType::f32, "wrap_parameter",
              "expected a gradient of f16, bf16 or f32 for '", name, "', got ", gradient.dtype());
  weight.set_requires_grad(true);
  weight.set_name(name);
  gradient.set_name("the gradient of " + name);
  core::GradientSlot& slot = weight.gradient_slot();
  slot.place(std::move(gradient));
  slot.mark_written();
  return {std::move(name), std::move(weight)};
}

NamedTensor wrap_parameter(std::string name, const TensorView& weight, const TensorView& gradient,
                           std::shared_ptr<void> owner) {
  Tensor wrapped = Tensor::wrap(weight, owner);
  return wrap_parameter(std::move(name), std::move(wrapped),
                        Tensor::wrap(gradient, std::move(owner)));
}

}  // namespace cairn::gradients
