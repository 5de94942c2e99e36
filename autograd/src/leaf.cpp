#include "leaf.h"

#include <algorithm>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/core/memory.h"
#include "cairn/gradients/arena.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "node_access.h"

namespace cairn::autograd {

using core::GradientSlot;
using core::MemoryCategory;

LeafState& leaf_state(const Tensor& leaf) {
  std::shared_ptr<void>& state = leaf.attachments().leaf;
  if (!state) state = std::make_shared<LeafState>();
  return *static_cast<LeafState*>(state.get());
}

namespace {
constexpr OpInfo kLeaf{"accumulate_grad"};
}  // namespace

AccumulateGrad::AccumulateGrad(Tensor leaf) : Node(kLeaf, Context()), leaf_(std::move(leaf)) {
  NodeAccess::mark_leaf(*this);
}

Tensors AccumulateGrad::backward(const Tensor&) {
  return {};
}

/// Of an arena without buffers.
bool AccumulateGrad::must_lend() const {
  const GradientSlot& slot = leaf_.gradient_slot();
  return !slot.placed() && !slot.memory().defined() && slot.owner() != nullptr;
}

/// Of a gradient that lies in no buffer.
DType AccumulateGrad::own_dtype() const {
  const auto arena = gradients::GradientArena::of(leaf_);
  return arena ? arena->gradient_dtype(leaf_) : leaf_.dtype();
}

bool AccumulateGrad::has_target() const {
  const GradientSlot& slot = leaf_.gradient_slot();
  if (slot.placed() || must_lend()) return true;
  if (!slot.holds_gradient() || !slot.memory().view().is_dense()) return false;
  return slot.memory().dtype() == leaf_.dtype() || slot.memory().dtype() == DType::f32;
}

GradTarget AccumulateGrad::target(const Shape& shape, const Strides& strides, DType dtype) {
  if (!has_target()) return {Tensor::empty_strided(shape, strides, dtype, leaf_.device()), false};
  GradientSlot& slot = leaf_.gradient_slot();
  if (must_lend())
    slot.lend(kernels::empty_with_layout_of(leaf_, own_dtype(), MemoryCategory::gradients));
  const bool accumulate = slot.write();
  return {slot.memory(), accumulate};
}

bool AccumulateGrad::landed(const Tensor& gradient) const {
  const Tensor& memory = leaf_.gradient_slot().memory();
  return memory.defined() && gradient.storage() == memory.storage() &&
         gradient.raw_data() == memory.raw_data();
}

AccumulateGrad* leaf_behind(Node* edge) {
  if (edge == nullptr) return nullptr;
  if (NodeAccess::is_leaf(*edge)) return static_cast<AccumulateGrad*>(edge);
  if (!NodeAccess::is_cast(*edge)) return nullptr;
  return leaf_behind(NodeAccess::impl(*edge)->inputs[0].edge.get());
}

bool AccumulateGrad::add(Tensor gradient) {
  if (landed(gradient)) return false;
  GradientSlot& slot = leaf_.gradient_slot();
  if (slot.placed() || slot.holds_gradient()) {
    const bool accumulate = slot.write();
    if (accumulate) {
      kernels::axpby(1.0, gradient, 1.0, slot.memory());
    } else {
      kernels::copy(gradient, slot.memory());
    }
    return accumulate;
  }
  const bool take =
      gradient.unique() && gradient.strides() == leaf_.strides() && gradient.dtype() == own_dtype();
  if (!take) {
    const Tensor copy =
        kernels::empty_with_layout_of(leaf_, own_dtype(), MemoryCategory::gradients);
    kernels::copy(gradient, copy);
    gradient = copy;
  }
  gradient.storage()->set_category(MemoryCategory::gradients);
  slot.adopt(std::move(gradient));
  return false;
}

void AccumulateGrad::fire_hooks() const {
  const auto hooks = leaf_state(leaf_).hooks;  // a hook may remove itself
  for (const auto& [id, hook] : hooks) hook(leaf_);
}

HookHandle on_gradient_ready(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  const core::TensorAttachments* attachments = leaf.attachments_or_null();
  CAIRN_CHECK(leaf.defined() && (attachments == nullptr || !attachments->graph),
              "on_gradient_ready", "expected a leaf, got the result of an operation");
  CAIRN_CHECK(hook, "on_gradient_ready", "expected a function, got an empty one");
  LeafState& state = leaf_state(leaf);
  const std::uint64_t id = state.next_id++;
  state.hooks.emplace_back(id, std::move(hook));
  const std::weak_ptr<void> weak = leaf.attachments().leaf;
  return HookHandle([weak, id] {
    const std::shared_ptr<void> alive = weak.lock();
    if (!alive) return;
    auto& hooks = static_cast<LeafState*>(alive.get())->hooks;
    std::erase_if(hooks, [id](const auto& entry) { return entry.first == id; });
  });
}

}  // namespace cairn::autograd
