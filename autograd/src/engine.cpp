#include "cairn/autograd/engine.h"

#include <chrono>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "cairn/autograd/function.h"
#include "cairn/kernels/elementwise.h"
#include "leaf.h"
#include "local.h"
#include "node_access.h"

namespace cairn::autograd {

using core::Error;
using core::fail;
using core::InvalidArgument;
using core::MemoryCategory;
using core::MemoryCategoryGuard;

namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class E>
[[noreturn]] void rethrow_named(const E& error, const Node& node) {
  throw E(core::str("[backward of ", node.name(), "] ", error.what()));
}

// Runs f; an error of Cairn's keeps its type and gains the node's name.
template <class F>
auto naming(const Node& node, F&& f) {
  try {
    return f();
  } catch (const InvalidArgument& error) {
    rethrow_named(error, node);
  } catch (const core::Unsupported& error) {
    rethrow_named(error, node);
  } catch (const core::OutOfMemory& error) {
    rethrow_named(error, node);
  } catch (const core::IoError& error) {
    rethrow_named(error, node);
  } catch (const core::DataError& error) {
    rethrow_named(error, node);
  } catch (const core::DeviceError& error) {
    rethrow_named(error, node);
  } catch (const core::CommunicationError& error) {
    rethrow_named(error, node);
  } catch (const Error& error) {
    if (typeid(error) != typeid(Error)) throw;  // an observer's own
    rethrow_named(error, node);
  }
}

Tensor sum_of(const Tensor& a, const Tensor& b) {
  if (a.unique() && a.view().is_dense()) {
    kernels::axpby(1.0, b, 1.0, a);
    return a;
  }
  Tensor sum = Tensor::empty_like(a);
  kernels::binary(kernels::BinaryOp::add, a, b, sum);
  return sum;
}

// The leaf whose gradient the edge takes, through a cast; null where it leads elsewhere.
const AccumulateGrad* leaf_behind(Node* edge) {
  if (edge == nullptr) return nullptr;
  if (NodeAccess::is_leaf(*edge)) return static_cast<AccumulateGrad*>(edge);
  if (std::string_view(edge->name()) != "cast") return nullptr;
  return leaf_behind(NodeAccess::impl(*edge)->inputs[0].edge.get());
}

// The observer's view of one node's backward.
class Watch {
 public:
  Watch(OpObserver* observer, const Node& node, const Context::Impl& impl, const Tensor& dy)
      : observer_(observer) {
    for (const InputInfo& input : impl.inputs) {
      const AccumulateGrad* leaf = leaf_behind(input.edge.get());
      if (leaf != nullptr) parameters_.push_back(leaf->leaf());
    }
    event_.name = node.name();
    event_.phase = Phase::backward;
    event_.device = dy.device();
    event_.dtype = dy.dtype();
    event_.inputs = {&dy, 1};
    event_.parameters = parameters_;
    observer_->begin(event_);
    begin_ns_ = now_ns();
  }

  void end(const Tensors& gradients) {
    event_.host_ns = now_ns() - begin_ns_;
    for (const Tensor& dx : gradients) {
      if (dx.defined()) event_.bytes_out += static_cast<std::int64_t>(dx.nbytes());
    }
    event_.outputs = gradients;
    observer_->end(event_);
  }

 private:
  OpObserver* observer_;
  OpEvent event_;
  Tensors parameters_;
  std::int64_t begin_ns_ = 0;
};

// One backward pass.
class Run final : public PendingGradients {
 public:
  explicit Run(bool retain_graph) : retain_graph_(retain_graph) {}

  Tensor* find(Node* node) override {
    const auto found = pending_.find(node);
    return found == pending_.end() ? nullptr : &found->second.gradient;
  }

  void execute(const std::shared_ptr<Node>& root, const Tensor& dy) {
    count_dependencies(root.get());
    ++pending_[root.get()].missing;
    arrive(root.get(), dy);
    while (!ready_.empty()) {
      Node* node = ready_.top().second;
      ready_.pop();
      process(node);
    }
    for (std::size_t i = 0; i < callbacks.size(); ++i) {
      const auto callback = std::move(callbacks[i]);  // it may add further ones
      callback();
    }
  }

  std::vector<std::function<void()>> callbacks;

 private:
  struct Pending {
    std::int64_t missing = 0;  // contributions that have not arrived
    bool touched = false;      // a leaf: one of them was a gradient
    Tensor gradient;
  };

  void count_dependencies(Node* root) {
    std::vector<Node*> stack{root};
    pending_.emplace(root, Pending{});
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      const Context::Impl* impl = NodeAccess::impl(*node);
      if (impl == nullptr) continue;
      check_not_released(*node, *impl);
      for (const InputInfo& input : impl->inputs) {
        if (!input.edge) continue;
        Pending& pending = pending_[input.edge.get()];
        if (pending.missing++ == 0) stack.push_back(input.edge.get());
      }
    }
  }

  static void check_not_released(const Node& node, const Context::Impl& impl) {
    if (!impl.released) return;
    fail<Error>("backward", "expected a graph that still has its saved tensors, got '", node.name(),
                "' whose graph was released by an earlier backward (pass retain_graph = true to "
                "that one)");
  }

  void process(Node* node) {
    Tensor dy = std::move(pending_[node].gradient);
    Context::Impl& impl = *NodeAccess::impl(*node);
    Tensors gradients(impl.inputs.size());
    if (dy.defined()) gradients = run(*node, impl, dy);
    dy = Tensor();  // a gradient that is only handed on may now be taken over
    for (std::size_t i = 0; i < impl.inputs.size(); ++i) {
      Node* edge = impl.inputs[i].edge.get();
      if (edge != nullptr) arrive(edge, std::move(gradients[i]));
    }
  }

  Tensors run(Node& node, Context::Impl& impl, const Tensor& dy) {
    for (InputInfo& input : impl.inputs) {
      input.handed_out = false;
      input.handed = Tensor();
    }
    impl.retained = retain_graph_;
    std::optional<Watch> watch;
    if (OpObserver* observer = local().observer) watch.emplace(observer, node, impl, dy);
    std::optional<core::DeviceGuard> device;
    if (impl.device.is_cuda()) device.emplace(impl.device);
    Tensors gradients = naming(node, [&] {
      Tensors result = node.backward(dy);
      check_gradients(impl, result);
      return result;
    });
    for (InputInfo& input : impl.inputs) input.handed = Tensor();  // whoever takes it has it alone
    if (!retain_graph_) release(impl);
    if (watch) watch->end(gradients);
    return gradients;
  }

  static void release(Context::Impl& impl) {
    impl.released = !impl.saved.empty();
    impl.saved.clear();
  }

  static void check_gradients(const Context::Impl& impl, const Tensors& gradients) {
    CAIRN_CHECK(gradients.size() == impl.inputs.size(), impl.op, "expected ", impl.inputs.size(),
                " gradients, got ", gradients.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (impl.inputs[i].edge) check_gradient(impl, i, gradients[i]);
    }
  }

  static void check_gradient(const Context::Impl& impl, std::size_t i, const Tensor& dx) {
    const InputInfo& input = impl.inputs[i];
    if (input.handed_out) {
      const bool returned = dx.defined() && (NodeAccess::is_leaf(*input.edge)
                                                 ? returned_target(input, dx)
                                                 : dx.raw_data() == input.handed.raw_data());
      CAIRN_CHECK(returned, impl.op, "expected the tensor of grad_target as gradient ", i,
                  ", got another one");
    }
    if (!dx.defined()) return;
    const bool leaf = NodeAccess::is_leaf(*input.edge);
    const bool dtype_fits = dx.dtype() == input.dtype || (leaf && core::is_floating(dx.dtype()));
    const bool fits = dx.shape() == input.shape && dtype_fits && dx.device() == input.device;
    CAIRN_CHECK(fits, impl.op, "expected gradient ", i, " of shape ", input.shape, " ", input.dtype,
                " on ", input.device, ", got ", dx.shape(), " ", dx.dtype(), " on ", dx.device());
  }

  // What was handed out must come back; a fresh tensor is only worth checking by its shape.
  static bool returned_target(const InputInfo& input, const Tensor& dx) {
    const auto& leaf = static_cast<const AccumulateGrad&>(*input.edge);
    return !leaf.has_target() || leaf.landed(dx);
  }

  // One contribution to the node's gradient; an undefined one only counts.
  void arrive(Node* node, Tensor gradient) {
    Pending& pending = pending_[node];
    const bool leaf = NodeAccess::is_leaf(*node);
    if (gradient.defined()) {
      pending.touched = true;
      if (leaf) {
        add_to_leaf(*static_cast<AccumulateGrad*>(node), std::move(gradient));
      } else if (!pending.gradient.defined()) {
        pending.gradient = std::move(gradient);
      } else {
        pending.gradient = sum_of(pending.gradient, gradient);
        observe_sum(pending.gradient, {});
      }
    }
    if (--pending.missing > 0) return;
    if (!leaf) {
      ready_.emplace(NodeAccess::impl(*node)->sequence, node);
    } else if (pending.touched) {
      static_cast<AccumulateGrad*>(node)->fire_hooks();
    }
  }

  static void add_to_leaf(AccumulateGrad& node, Tensor gradient) {
    if (!node.add(std::move(gradient))) return;
    observe_sum(*node.leaf().meta().grad, {&node.leaf(), 1});
  }

  // A sum of contributions can overflow where none of them did.
  static void observe_sum(const Tensor& sum, std::span<const Tensor> leaf) {
    OpObserver* observer = local().observer;
    if (observer == nullptr) return;
    OpEvent event;
    event.name = "accumulate_grad";
    event.phase = Phase::backward;
    event.device = sum.device();
    event.dtype = sum.dtype();
    event.bytes_out = static_cast<std::int64_t>(sum.nbytes());
    event.parameters = leaf;
    observer->begin(event);
    event.outputs = {&sum, 1};
    observer->end(event);
  }

  bool retain_graph_;
  std::unordered_map<Node*, Pending> pending_;
  std::priority_queue<std::pair<std::uint64_t, Node*>> ready_;  // newest first
};

Tensor first_gradient(const Tensor& root, const Tensor& gradient) {
  if (!gradient.defined()) {
    CAIRN_CHECK(root.numel() == 1, "backward",
                "expected a gradient for a root of more than one element, got none for ",
                root.shape());
    return Tensor::full(root.shape(), 1.0, root.dtype(), root.device());
  }
  const bool fits = gradient.shape() == root.shape() && gradient.dtype() == root.dtype() &&
                    gradient.device() == root.device();
  CAIRN_CHECK(fits, "backward", "expected a gradient like the root, ", root.shape(), " ",
              root.dtype(), " on ", root.device(), ", got ", gradient.shape(), " ",
              gradient.dtype(), " on ", gradient.device());
  return gradient;
}

// Makes a run the thread's current one.
class RunGuard {
 public:
  explicit RunGuard(Run& run)
      : previous_(std::exchange(local().end_callbacks, &run.callbacks)),
        previous_pending_(std::exchange(local().pending, &run)) {
    ThreadState state = ThreadState::capture();
    state.grad_enabled = false;
    state.autocast = {};
    guard_.emplace(state);
    if (MemoryCategoryGuard::current() == MemoryCategory::other) {
      category_.emplace(MemoryCategory::activations);
    }
  }
  ~RunGuard() {
    local().end_callbacks = previous_;
    local().pending = previous_pending_;
  }
  RunGuard(const RunGuard&) = delete;
  RunGuard& operator=(const RunGuard&) = delete;

 private:
  std::vector<std::function<void()>>* previous_;
  PendingGradients* previous_pending_;
  std::optional<ThreadStateGuard> guard_;
  std::optional<MemoryCategoryGuard> category_;
};

}  // namespace

void backward(const Tensor& root, const Tensor& gradient, const BackwardOptions& options) {
  CAIRN_CHECK(root.defined(), "backward", "expected a tensor as root, got an undefined one");
  const std::shared_ptr<Node> node = gradient_edge(root);
  CAIRN_CHECK(node, "backward",
              "expected a root that depends on a tensor that requires a gradient, got ",
              root.shape(), " ", root.dtype(), " without a graph (was it made under no_grad?)");
  Run run(options.retain_graph);
  const RunGuard guard(run);
  run.execute(node, first_gradient(root, gradient));
}

void on_backward_end(std::function<void()> callback) {
  CAIRN_CHECK(in_backward(), "on_backward_end", "expected to be inside a backward, got a call ",
              "outside of one");
  local().end_callbacks->push_back(std::move(callback));
}

bool in_backward() {
  return local().end_callbacks != nullptr;
}

}  // namespace cairn::autograd
