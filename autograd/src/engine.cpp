#include "cairn/autograd/engine.h"

#include <atomic>
#include <optional>
#include <queue>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "cairn/autograd/function.h"
#include "cairn/core/log.h"
#include "cairn/core/work_observer.h"
#include "cairn/gradients/arena.h"
#include "cairn/gradients/stash.h"
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

/// Joins them to the run ahead of their begin: the reducer of one that cannot begin is told.
void begin_leaves(RunRecord& run, const std::vector<Tensor>& leaves) {
  run.leaves.insert(run.leaves.end(), leaves.begin(), leaves.end());
  gradients::begin_run(run.id, run.scale, leaves);
}

// One call of backward().
class Run final : public PendingGradients {
 public:
  explicit Run(bool retain_graph) : retain_graph_(retain_graph) {}

  Tensor* find(Node* node) override {
    const auto found = pending_.find(node);
    return found == pending_.end() ? nullptr : &found->second.gradient;
  }

  void execute(const std::shared_ptr<Node>& root, const Tensor& dy) {
    count_dependencies(root.get());
    begin_leaves(*local().run, leaves_);
    ++pending_[root.get()].missing;
    arrive(root.get(), dy);
    while (!ready_.empty()) {
      Node* node = ready_.top().second;
      ready_.pop();
      process(node);
    }
  }

 private:
  struct Pending {
    std::int64_t missing = 0;  // contributions that have not arrived
    bool touched = false;      // one of them landed in the leaf that this is, or that lies behind
    Tensor gradient;
  };

  void count_dependencies(Node* root) {
    std::vector<Node*> stack{root};
    pending_.emplace(root, Pending{});
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      if (NodeAccess::is_leaf(*node))
        leaves_.push_back(static_cast<const AccumulateGrad*>(node)->leaf());
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
    Pending& pending = pending_[node];
    const bool landed = pending.touched;  // of a cast: in the leaf behind it
    Tensor dy = std::move(pending.gradient);
    Context::Impl& impl = *NodeAccess::impl(*node);
    Tensors gradients(impl.inputs.size());
    std::optional<core::WorkSpan> span;  // with what its gradients set off
    if (dy.defined()) {
      span.emplace(core::ObservedWork::Kind::backward, node->name(), impl.device);
      gradients = run(*node, impl, dy);
    }
    dy = Tensor();  // a gradient that is only handed on may now be taken over
    for (std::size_t i = 0; i < impl.inputs.size(); ++i) {
      Node* edge = impl.inputs[i].edge.get();
      if (edge != nullptr) arrive(edge, std::move(gradients[i]), landed);
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
    const bool lands = NodeAccess::is_leaf(*input.edge) || landed_behind(*input.edge, dx);
    const bool dtype_fits = dx.dtype() == input.dtype || (lands && core::is_floating(dx.dtype()));
    const bool fits = dx.shape() == input.shape && dtype_fits && dx.device() == input.device;
    CAIRN_CHECK(fits, impl.op, "expected gradient ", i, " of shape ", input.shape, " ", input.dtype,
                " on ", input.device, ", got ", dx.shape(), " ", dx.dtype(), " on ", dx.device());
  }

  // What was handed out must come back; a fresh tensor is only worth checking by its shape.
  static bool returned_target(const InputInfo& input, const Tensor& dx) {
    const auto& leaf = static_cast<const AccumulateGrad&>(*input.edge);
    return !leaf.has_target() || leaf.landed(dx);
  }

  // An operation wrote the gradient of a weight that was cast for it where the weight's own lies.
  static bool landed_behind(Node& edge, const Tensor& gradient) {
    if (!NodeAccess::is_cast(edge)) return false;
    const AccumulateGrad* leaf = leaf_behind(&edge);
    return leaf != nullptr && leaf->landed(gradient);
  }

  // One contribution to the node's gradient; an undefined one only counts. landed: one that was
  // written to the leaf already.
  void arrive(Node* node, Tensor gradient, bool landed = false) {
    Pending& pending = pending_[node];
    const bool leaf = NodeAccess::is_leaf(*node);
    pending.touched = pending.touched || (leaf && landed);
    if (gradient.defined()) {
      if (leaf) {
        pending.touched = true;
        add_to_leaf(*static_cast<AccumulateGrad*>(node), std::move(gradient));
      } else if (landed_behind(*node, gradient)) {
        pending.touched = true;
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
    observe_sum(node.leaf().gradient_slot().memory(), {&node.leaf(), 1});
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
  std::vector<Tensor> leaves_;
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

core::RunId next_run() {
  static std::atomic<core::RunId> last{0};
  return ++last;
}

// What holds while one backward runs; the first one on its thread is the run that the others belong
// to.
class RunGuard {
 public:
  RunGuard(Run& run, RunRecord& record)
      : previous_run_(local().run), previous_pending_(std::exchange(local().pending, &run)) {
    if (previous_run_ == nullptr) local().run = &record;
    ThreadState state = ThreadState::capture();
    state.grad_enabled = false;
    state.autocast = {};
    guard_.emplace(state);
    if (MemoryCategoryGuard::current() == MemoryCategory::other) {
      category_.emplace(MemoryCategory::activations);
    }
  }
  ~RunGuard() {
    local().run = previous_run_;
    local().pending = previous_pending_;
  }
  RunGuard(const RunGuard&) = delete;
  RunGuard& operator=(const RunGuard&) = delete;

 private:
  RunRecord* previous_run_;
  PendingGradients* previous_pending_;
  std::optional<ThreadStateGuard> guard_;
  std::optional<MemoryCategoryGuard> category_;
};

/// In GANs and in fine-tuning every parameter that gets a gradient belongs to an optimizer, or is
/// frozen.
void warn_of_untrained(const RunRecord& run) {
  std::vector<Tensor> untrained;
  bool trains = false;
  for (const Tensor& leaf : run.leaves) {
    if (gradients::has_optimizer(leaf)) {
      trains = true;
    } else if (!leaf.name().empty() && !leaf_state(leaf).reported_untrained) {
      untrained.push_back(leaf);
    }
  }
  if (!trains || untrained.empty()) return;
  for (const Tensor& leaf : untrained) leaf_state(leaf).reported_untrained = true;
  log::warn(
      "backward: no optimizer has the parameter '{}'{}, which got a gradient beside others that "
      "are trained (is its layer registered with add_module or nn::Child? was it added after "
      "model.parameters() was taken? freeze with set_requires_grad(false) what is not trained)",
      untrained.front().name(),
      untrained.size() > 1 ? core::str(" and ", untrained.size() - 1, " more") : std::string());
}

[[noreturn]] void refuse_create_graph() {
  fail<core::Unsupported>(
      "backward", "expected create_graph false, got true: a backward records nothing, so that ",
      "gradients have no graph (it would take a recorded backward of every operation; take a ",
      "gradient penalty along a direction d instead, by finite differences: ",
      "(loss(x + h d) - loss(x - h d)) / (2 h) is recorded as any loss)");
}

void end(RunRecord& run) {
  for (std::size_t i = 0; i < run.on_end.size(); ++i) {
    const auto callback = std::move(run.on_end[i]);  // it may add further ones
    callback();
  }
  for (const Tensor& leaf : run.leaves) leaf.gradient_slot().end();
  warn_of_untrained(run);
}

std::string text_of_current_exception() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an error without a text";
  }
}

// Every callback and reducer is called and every slot aborted, whatever is thrown there: the caller
// gets the error that ended the run.
void abort(RunRecord& run, const std::string& error) {
  const auto tell = [&](const auto& whom) {
    try {
      whom(error);
    } catch (...) {
      log::warn("backward: after '{}', who was told of it threw: {}", error,
                text_of_current_exception());
    }
  };
  for (const auto& callback : run.on_abort) tell(callback);
  for (const Tensor& leaf : run.leaves) {
    const auto reducer = leaf.gradient_slot().reducer();
    if (reducer) tell([&](const std::string& why) { reducer->backward_failed(why); });
  }
  for (const Tensor& leaf : run.leaves) leaf.gradient_slot().abort(error);
}

}  // namespace

void backward(const Tensor& root, const Tensor& gradient, const BackwardOptions& options) {
  CAIRN_CHECK(root.defined(), "backward", "expected a tensor as root, got an undefined one");
  if (options.create_graph) refuse_create_graph();
  const std::shared_ptr<Node> node = gradient_edge(root);
  CAIRN_CHECK(
      node, "backward", "expected a root that depends on a tensor that requires a gradient, got ",
      root.shape(), " ", root.dtype(),
      " without a graph (was it made under no_grad, or of gradients, which are constants?)");
  Run run(options.retain_graph);
  const bool outermost = !in_backward();
  RunRecord record{outermost ? next_run() : 0, options.scale, {}, {}, {}};
  const RunGuard guard(run, record);
  try {
    run.execute(node, first_gradient(root, gradient));
    if (outermost) end(record);
  } catch (...) {
    if (outermost) abort(record, text_of_current_exception());
    throw;
  }
}

void on_backward_end(std::function<void()> callback, OnAbort on_abort) {
  CAIRN_CHECK(in_backward(), "on_backward_end", "expected to be inside a backward, got a call ",
              "outside of one");
  local().run->on_end.push_back(std::move(callback));
  if (on_abort) local().run->on_abort.push_back(std::move(on_abort));
}

void join_run(const Tensor& leaf) {
  CAIRN_CHECK(in_backward(), "join_run", "expected to be inside a backward, got a call outside of ",
              "one");
  begin_leaves(*local().run, {leaf});
}

core::RunId current_run() {
  return local().run == nullptr ? 0 : local().run->id;
}

}  // namespace cairn::autograd
