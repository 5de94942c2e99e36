#include "leaf.h"

#include <algorithm>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"
#include "node_access.h"

namespace cairn::autograd {

using core::GradMeta;
using core::MemoryCategory;

LeafState& leaf_state(const Tensor& leaf) {
  GradMeta& meta = leaf.meta();
  if (!meta.leaf) meta.leaf = std::make_shared<LeafState>();
  return *static_cast<LeafState*>(meta.leaf.get());
}

AccumulateGrad::AccumulateGrad(Tensor leaf)
    : Node("accumulate_grad", Context()), leaf_(std::move(leaf)) {
  NodeAccess::mark_leaf(*this);
}

Tensors AccumulateGrad::backward(const Tensor&) {
  return {};
}

bool AccumulateGrad::has_target() const {
  const GradMeta& meta = leaf_.meta();
  if (meta.slot) return true;
  if (!meta.grad || !meta.grad->view().is_dense()) return false;
  return meta.grad->dtype() == leaf_.dtype() || meta.grad->dtype() == DType::f32;
}

GradTarget AccumulateGrad::target(const Shape& shape, const Strides& strides, DType dtype) {
  GradMeta& meta = leaf_.meta();
  if (!has_target()) return {Tensor::empty_strided(shape, strides, dtype, leaf_.device()), false};
  const bool written = !meta.slot || std::exchange(meta.grad_written, true);
  return {*meta.grad, written};
}

bool AccumulateGrad::landed(const Tensor& gradient) const {
  const GradMeta* meta = leaf_.meta_or_null();
  return meta->grad && gradient.storage() == meta->grad->storage() &&
         gradient.raw_data() == meta->grad->raw_data();
}

bool AccumulateGrad::add(Tensor gradient) {
  if (landed(gradient)) return false;
  GradMeta& meta = leaf_.meta();
  if (meta.grad && (!meta.slot || meta.grad_written)) {
    kernels::axpby(1.0, gradient, 1.0, *meta.grad);
    return true;
  }
  if (meta.slot) {
    kernels::copy(gradient, *meta.grad);
    meta.grad_written = true;
    return false;
  }
  const bool take = gradient.unique() && gradient.strides() == leaf_.strides() &&
                    gradient.dtype() == leaf_.dtype();
  if (!take) {
    const Tensor copy = Tensor::empty_like(leaf_);
    kernels::copy(gradient, copy);
    gradient = copy;
  }
  gradient.storage()->set_category(MemoryCategory::gradients);
  meta.grad = std::make_shared<Tensor>(std::move(gradient));
  return false;
}

void AccumulateGrad::fire_hooks() const {
  const auto hooks = leaf_state(leaf_).hooks;  // a hook may remove itself
  for (const auto& [id, hook] : hooks) hook(leaf_);
}

HookHandle on_gradient_ready(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  CAIRN_CHECK(is_parameter(leaf), "on_gradient_ready",
              "expected a leaf that requires a gradient, got another tensor");
  CAIRN_CHECK(hook, "on_gradient_ready", "expected a function, got an empty one");
  LeafState& state = leaf_state(leaf);
  const std::uint64_t id = state.next_id++;
  state.hooks.emplace_back(id, std::move(hook));
  const std::weak_ptr<void> weak = leaf.meta().leaf;
  return HookHandle([weak, id] {
    const std::shared_ptr<void> alive = weak.lock();
    if (!alive) return;
    auto& hooks = static_cast<LeafState*>(alive.get())->hooks;
    std::erase_if(hooks, [id](const auto& entry) { return entry.first == id; });
  });
}

}  // namespace cairn::autograd
