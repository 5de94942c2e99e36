// How an operation is written: one struct with its name and cast policy, its attributes as members, forward and backward side by side.
//
//   struct Softmax {
//     static constexpr OpInfo kInfo{"softmax", CastPolicy::f32};
//     kernels::SoftmaxOptions options;
//     Tensor forward(Context& ctx, const Tensor& x) {
//       Tensor y = Tensor::empty_like(x);
//       kernels::softmax(x, y, options);
//       ctx.save(y);
//       return y;
//     }
//     Tensors backward(Context& ctx, const Tensor& dy) {
//       Tensor dx = Tensor::empty_like(dy);
//       kernels::softmax_backward(ctx.saved(0), dy, dx, options);
//       return {dx};
//     }
//   };
//   Tensor softmax(const Tensor& x) { return apply(Softmax{}, x); }
//
// apply() is the only way an operation runs: it casts by policy, tells the observer, runs forward with recording off, and records a node
// when gradients are on and an input wants one. Inputs may be undefined tensors (an absent bias).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/tensor.h"

namespace cairn::autograd {

using Tensors = std::vector<Tensor>;

/// What autocast does with an operation's floating inputs: half (matrix products, convolutions), f32 (sums, norms, losses, exponentials),
/// promote (the widest of the inputs), keep (as they come).
enum class CastPolicy { keep, half, f32, promote };

struct OpInfo {
  const char* name;
  CastPolicy policy = CastPolicy::keep;
};

class Node;

/// Where a gradient lands: a leaf's arena slot (overwrite on the first contribution of a step, accumulate on later ones) or a fresh tensor.
struct GradTarget {
  Tensor tensor;
  bool accumulate = false;
};

class SavedTensor;  // what a pack hook made of a saved tensor

/// One operation's memory between forward and backward.
class Context {
 public:
  Context();
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;

  /// Keeps a tensor for the backward, through the saved-tensor hooks. Undefined tensors may be saved. No-op where nothing is recorded.
  void save(const Tensor& tensor);
  /// The i-th saved tensor. Throws core::Error naming the op where it was written in place since, or already released.
  Tensor saved(int i) const;

  bool needs_grad(int input) const;        // forward and backward: is a gradient wanted for this input?
  bool recording() const;                  // forward: will backward be possible?
  const Shape& input_shape(int input) const;
  DType input_dtype(int input) const;
  /// Where to put the gradient of the input. Call at most once per input and backward; return its tensor from backward.
  /// dtype of a slot may be f32 where the input is half. A fresh tensor has the input's shape and dtype, contiguous (or the input's dense strides).
  GradTarget grad_target(int input);

 private:
  friend class Node;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A recorded operation. Made by apply(); released iteratively, so graphs may be millions of nodes deep.
class Node {
 public:
  virtual ~Node();
  virtual Tensors backward(const Tensor& dy) = 0;
  const char* name() const { return name_; }

 protected:
  const char* name_ = "";
  Context context_;

 private:
  friend struct NodeAccess;  // the engine's and apply's way in
  struct Links;
  std::shared_ptr<Links> links_;
};

namespace detail {
template <class Op>
class OpNode final : public Node {
 public:
  OpNode(Op op, Context context) : op_(std::move(op)) {
    name_ = Op::kInfo.name;
    context_ = std::move(context);
  }
  Tensors backward(const Tensor& dy) override { return op_.backward(context_, dy); }

 private:
  Op op_;
};

/// Everything of apply that does not depend on the op's type.
class Application {
 public:
  Application(const OpInfo& info, Tensors& inputs);  // checks devices, casts, opens the observer's event, turns recording off
  ~Application();
  Context& context() { return context_; }
  bool recording() const { return recording_; }
  void finish(Tensor& y, std::unique_ptr<Node> node);  // links the node and marks y; node null where nothing is recorded

 private:
  const OpInfo& info_;
  Tensors& inputs_;
  Context context_;
  bool recording_ = false;
  bool previous_grad_mode_ = true;
  std::int64_t event_ = 0;
};

template <class Op, std::size_t... I>
Tensor call_forward(Op& op, Context& context, const Tensors& inputs, std::index_sequence<I...>) {
  return op.forward(context, inputs[I]...);
}

template <class Op, class Forward>
Tensor apply_to(Op op, Tensors inputs, Forward forward) {
  Application application(Op::kInfo, inputs);
  Tensor y = forward(op, application.context(), inputs);
  std::unique_ptr<Node> node;
  if (application.recording()) node = std::make_unique<OpNode<Op>>(std::move(op), std::move(application.context()));
  application.finish(y, std::move(node));
  return y;
}
}  // namespace detail

/// Runs an operation on a fixed list of inputs: forward(ctx, x0, x1, ...).
template <class Op, class... Inputs>
Tensor apply(Op op, const Inputs&... inputs) {
  return detail::apply_to(std::move(op), Tensors{inputs...}, [](Op& o, Context& context, const Tensors& list) {
    return detail::call_forward(o, context, list, std::make_index_sequence<sizeof...(Inputs)>{});
  });
}
/// Runs an operation on a list of any length: forward(ctx, inputs).
template <class Op>
Tensor apply_list(Op op, Tensors inputs) {
  return detail::apply_to(std::move(op), std::move(inputs),
                          [](Op& o, Context& context, const Tensors& list) { return o.forward(context, list); });
}

}  // namespace cairn::autograd
