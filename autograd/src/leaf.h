// A leaf's end of the graph: where its gradients land, and who wants to know.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cairn/autograd/function.h"

namespace cairn::autograd {

/// Kept by the leaf (TensorAttachments::leaf). The node is kept by the graphs that lead to the leaf
/// and keeps the leaf: no cycle.
struct LeafState {
  std::weak_ptr<Node> accumulate;
  std::vector<std::pair<std::uint64_t, std::function<void(const Tensor&)>>> hooks;
  std::uint64_t next_id = 0;
  bool reported_untrained = false;
};

LeafState& leaf_state(const Tensor& leaf);

class AccumulateGrad final : public Node {
 public:
  explicit AccumulateGrad(Tensor leaf);
  Tensors backward(const Tensor& dy) override;  // never called: the engine adds

  const Tensor& leaf() const { return leaf_; }
  GradTarget target(const Shape& shape, const Strides& strides, DType dtype);
  bool must_lend() const;
  DType own_dtype() const;  // of a gradient that lies alone
  bool has_target() const;  // gradients land in a slot, or on top of an earlier gradient
  /// True where the gradient was written through target().
  bool landed(const Tensor& gradient) const;
  bool add(Tensor gradient);  // true where it was added to an earlier one by a pass of its own
  void fire_hooks() const;

 private:
  Tensor leaf_;
};

/// The leaf whose gradient the edge takes, also through casts; null where it leads elsewhere.
AccumulateGrad* leaf_behind(Node* edge);

}  // namespace cairn::autograd
