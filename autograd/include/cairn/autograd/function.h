// How an operation is written: one struct with its name and cast policy, its attributes as members,
// forward and backward side by side.
//
//   using namespace cairn::autograd;
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
// apply() is the only way an operation runs: it casts by policy, tells the observer, runs forward
// with recording off, and records a node when gradients are on and an input wants one. Inputs may
// be undefined tensors (an absent bias).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "cairn/autograd/observer.h"
#include "cairn/autograd/op_recall.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "cairn/core/work_observer.h"

namespace cairn::autograd {

using Tensors = std::vector<Tensor>;

struct OpInfo {
  const char* name;
  CastPolicy policy = CastPolicy::keep;
  const char* advice = "";  // for banned: what to do instead
  bool converts = false;    // only changes the dtype: a gradient may land in the leaf behind it
};

class Node;

/// Where a gradient lands: a leaf's arena slot or own gradient (overwrite on the first contribution
/// of a step, accumulate on later ones), the sum of what other users of the same tensor have
/// contributed in this backward (accumulate), or a fresh tensor (overwrite).
struct GradTarget {
  Tensor tensor;
  bool accumulate = false;
};

/// One operation's memory between forward and backward.
class Context {
 public:
  Context();
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;

  /// Keeps a tensor for the backward, through the saved-tensor hooks. Undefined tensors may be
  /// saved. No-op where nothing is recorded. The graph of the tensor is not kept. Save inputs
  /// before computing: a replay that needs nothing else ends there.
  void save(const Tensor& tensor);
  /// The i-th saved tensor, without a graph; ask once per backward. Throws core::Error naming the
  /// op where it was written in place since, or was released by an earlier backward.
  Tensor saved(int i) const;

  /// The same, and gives the context's own handle up unless the graph is retained: where the result
  /// is then unique(), the backward may write a gradient over it.
  Tensor take_saved(int i);

  bool needs_grad(int input) const;  // is a gradient wanted for this input? false: not recording
  bool recording() const;            // forward: will backward be possible?
  // Of the inputs as forward saw them (after casts). Only where recording().
  const Shape& input_shape(int input) const;
  DType input_dtype(int input) const;
  /// Where to put the gradient of the input. Call at most once per input and backward, and return
  /// its tensor from backward. The dtype may be f32 where the input is half. A fresh tensor has the
  /// input's shape, dtype and dense strides.
  GradTarget grad_target(int input);
  /// A fresh tensor with the input's shape, dtype and dense strides: for kernels that cannot
  /// accumulate.
  Tensor new_gradient(int input) const;

  struct Impl;

 private:
  friend class Node;
  friend struct NodeAccess;
  std::unique_ptr<Impl> impl_;  // null: not recording
};

/// A recorded operation. Made by apply(); released iteratively, so graphs may be millions of nodes
/// deep.
class Node {
 public:
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  /// Gradients of the inputs, one each; undefined where there is none (or none is wanted).
  virtual Tensors backward(const Tensor& dy) = 0;
  const char* name() const { return info_.name; }

 protected:
  Node(const OpInfo& info, Context context) : context_(std::move(context)), info_(info) {}
  Context context_;

 private:
  friend struct NodeAccess;  // the engine's and apply's way in
  const OpInfo& info_;
  bool leaf_ = false;
};

namespace detail {
/// Notes down that the program has this operation: see operations() in autocast.h.
bool register_operation(const OpInfo& info);
template <class Op>
inline const bool kRegistered = register_operation(Op::kInfo);  // before main

template <class Op>
class OpNode final : public Node {
 public:
  OpNode(Op op, Context context) : Node(Op::kInfo, std::move(context)), op_(std::move(op)) {}
  Tensors backward(const Tensor& dy) override { return op_.backward(context_, dy); }

 private:
  Op op_;
};

/// Everything of apply that does not depend on the op's type.
class Application {
 public:
  /// Checks devices, casts by policy, opens the observer's event, turns recording off.
  Application(const OpInfo& info, std::span<Tensor> inputs);
  ~Application();
  Application(const Application&) = delete;
  Application& operator=(const Application&) = delete;

  Context& context() { return context_; }
  bool recording() const { return context_.recording(); }
  /// What stands in for the forward; undefined: it runs.
  Tensor recalled();
  /// Makes y depend on the node; null where nothing is recorded. Closes the observer's event.
  void finish(Tensor& y, std::shared_ptr<Node> node);

 private:
  struct Observation;
  void open_event();
  void close_event(const Tensor& y, const Context::Impl* impl);

  const OpInfo& info_;
  std::span<Tensor> inputs_;
  Context context_;
  bool previous_grad_mode_;
  OpRecall* recall_;                          // to be asked; null: none
  OpRecall* previous_recall_;                 // of the thread
  std::unique_ptr<Observation> observation_;  // null: nobody watches
  std::optional<core::WorkSpan> span_;
  std::optional<core::MemoryCategoryGuard> category_;
  std::optional<core::DeviceGuard> device_;
};

template <class Op, class Forward>
Tensor apply_to(Op op, std::span<Tensor> inputs, Forward forward) {
  [[maybe_unused]] static constexpr const bool* registered = &kRegistered<Op>;
  Application application(Op::kInfo, inputs);
  Tensor y = application.recalled();
  if (!y.defined()) y = forward(op, application.context());
  std::shared_ptr<Node> node;
  if (application.recording()) {
    node = std::make_shared<OpNode<Op>>(std::move(op), std::move(application.context()));
  }
  application.finish(y, std::move(node));
  return y;
}
}  // namespace detail

/// Runs an operation on a fixed list of inputs: forward(ctx, x0, x1, ...).
template <class Op, class... Inputs>
Tensor apply(Op op, const Inputs&... inputs) {
  std::array<Tensor, sizeof...(Inputs)> list{inputs...};
  return detail::apply_to(std::move(op), list, [&](Op& o, Context& context) {
    return std::apply([&](const auto&... x) { return o.forward(context, x...); }, list);
  });
}
/// Runs an operation on a list of any length: forward(ctx, inputs).
template <class Op>
Tensor apply_list(Op op, Tensors inputs) {
  return detail::apply_to(std::move(op), std::span<Tensor>(inputs),
                          [&](Op& o, Context& context) { return o.forward(context, inputs); });
}

}  // namespace cairn::autograd
