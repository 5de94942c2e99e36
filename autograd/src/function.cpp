#include "cairn/autograd/function.h"

#include <atomic>
#include <utility>

#include "cairn/kernels/elementwise.h"
#include "cast.h"
#include "leaf.h"
#include "local.h"
#include "node_access.h"

namespace cairn::autograd {

using core::Error;
using core::fail;
using core::MemoryCategory;
using core::MemoryCategoryGuard;

// ---- Context

Context::Context() = default;
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

bool Context::recording() const {
  return impl_ != nullptr;
}

void Context::save(const Tensor& tensor) {
  if (!impl_) return;
  impl_->saved.emplace_back(tensor);
  if (tensor.defined() && !is_parameter(tensor)) {
    impl_->bytes_saved += static_cast<std::int64_t>(tensor.nbytes());
  }
}

namespace {
SavedTensor& saved_of(Context::Impl& impl, int i) {
  if (impl.released) {
    fail<Error>(impl.op, "expected saved tensors, got a graph that was released");
  }
  CAIRN_CHECK(i >= 0 && i < static_cast<int>(impl.saved.size()), impl.op, "expected one of ",
              impl.saved.size(), " saved tensors, got index ", i);
  return impl.saved[static_cast<std::size_t>(i)];
}
}  // namespace

Tensor Context::saved(int i) const {
  return saved_of(*impl_, i).unpack(impl_->op);
}

Tensor Context::take_saved(int i) {
  SavedTensor& saved = saved_of(*impl_, i);
  Tensor tensor = saved.unpack(impl_->op);
  if (!impl_->retained) saved = SavedTensor(Tensor());
  return tensor;
}

namespace {
InputInfo& input_of(Context::Impl* impl, int input) {
  CAIRN_CHECK(impl != nullptr, "context", "expected a recorded operation, got one without a graph");
  CAIRN_CHECK(input >= 0 && input < static_cast<int>(impl->inputs.size()), impl->op,
              "expected one of ", impl->inputs.size(), " inputs, got index ", input);
  return impl->inputs[static_cast<std::size_t>(input)];
}
}  // namespace

bool Context::needs_grad(int input) const {
  return impl_ && input_of(impl_.get(), input).needs_grad;
}
const Shape& Context::input_shape(int input) const {
  return input_of(impl_.get(), input).shape;
}
DType Context::input_dtype(int input) const {
  return input_of(impl_.get(), input).dtype;
}

namespace {
// The sum of earlier contributions to the same gradient, where nobody else has it: adding to it
// saves a tensor and a pass.
Tensor take_pending(const InputInfo& info) {
  PendingGradients* run = local().pending;
  Tensor* gradient = run != nullptr && info.edge ? run->find(info.edge.get()) : nullptr;
  const bool fits = gradient != nullptr && gradient->defined() && gradient->unique() &&
                    gradient->dtype() == info.dtype && gradient->strides() == info.strides;
  return fits ? std::exchange(*gradient, Tensor()) : Tensor();
}
}  // namespace

namespace {
// A weight that autocast made half and whose f32 gradient has a slot: the product writes there, and
// no cast follows. Whether it does never changes within a run, so replays of a segment have the
// same bits.
AccumulateGrad* leaf_behind_cast(const InputInfo& info) {
  if (!info.edge || !NodeAccess::is_cast(*info.edge) || !core::is_half(info.dtype)) return nullptr;
  AccumulateGrad* leaf = leaf_behind(info.edge.get());
  if (leaf == nullptr) return nullptr;
  const core::GradientSlot& slot = leaf->leaf().gradient_slot();
  const bool has_place = slot.placed() || slot.owner() != nullptr;
  const Tensor& like = slot.memory().defined() ? slot.memory() : leaf->leaf();
  return has_place && like.dtype() == DType::f32 ? leaf : nullptr;
}
}  // namespace

GradTarget Context::grad_target(int input) {
  InputInfo& info = input_of(impl_.get(), input);
  if (AccumulateGrad* leaf = leaf_behind_cast(info)) {
    GradTarget target = leaf->target(info.shape, info.strides, info.dtype);
    info.handed_out = true;
    info.handed = target.tensor;
    return target;
  }
  if (!info.edge || !NodeAccess::is_leaf(*info.edge)) {
    Tensor pending = take_pending(info);
    if (!pending.defined()) return {new_gradient(input), false};
    info.handed_out = true;
    info.handed = pending;
    return {std::move(pending), true};
  }
  info.handed_out = true;
  return static_cast<AccumulateGrad&>(*info.edge).target(info.shape, info.strides, info.dtype);
}

Tensor Context::new_gradient(int input) const {
  const InputInfo& info = input_of(impl_.get(), input);
  return Tensor::empty_strided(info.shape, info.strides, info.dtype, info.device);
}

// ---- Node

namespace {
// Nodes waiting to be destroyed: a long chain must not recurse.
thread_local std::vector<std::shared_ptr<Node>>* graveyard = nullptr;

void bury(std::vector<std::shared_ptr<Node>> dead) {
  graveyard = &dead;
  while (!dead.empty()) {
    const std::shared_ptr<Node> node = std::move(dead.back());
    dead.pop_back();
  }
  graveyard = nullptr;
}
}  // namespace

Node::~Node() {
  if (!context_.impl_) return;
  std::vector<std::shared_ptr<Node>> edges;
  auto& dead = graveyard != nullptr ? *graveyard : edges;
  for (InputInfo& input : context_.impl_->inputs) {
    if (input.edge) dead.push_back(std::move(input.edge));
  }
  if (graveyard == nullptr) bury(std::move(edges));
}

std::shared_ptr<Node> gradient_edge(const Tensor& tensor) {
  if (!tensor.requires_grad()) return nullptr;
  if (const auto& graph = tensor.attachments().graph) return std::static_pointer_cast<Node>(graph);
  LeafState& state = leaf_state(tensor);
  std::shared_ptr<Node> node = state.accumulate.lock();
  if (!node) {
    node = std::make_shared<AccumulateGrad>(tensor);
    state.accumulate = node;
  }
  return node;
}

// ---- Application

namespace {

std::uint64_t next_sequence() {
  static std::atomic<std::uint64_t> sequence{0};  // global: a graph may span threads
  return sequence.fetch_add(1, std::memory_order_relaxed);
}

void check_inputs(const OpInfo& info, std::span<Tensor> inputs) {
  CAIRN_CHECK(!inputs.empty() && inputs[0].defined(), info.name,
              "expected a tensor as input 0, got none");
  const Device device = inputs[0].device();
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || inputs[i].device() == device) continue;
    fail(info.name, "expected all inputs on ", device, ", got input ", i, " on ",
         inputs[i].device(), " (move it with autograd::to)");
  }
}

InputInfo describe(const Tensor& x) {
  InputInfo info;
  if (!x.defined()) return info;
  const core::TensorView view = x.view();
  info.dtype = view.dtype;
  info.device = view.device;
  info.shape = view.shape;
  info.strides = view.is_dense() ? view.strides : core::contiguous_strides(view.shape);
  info.edge = gradient_edge(x);
  info.needs_grad = info.edge != nullptr;
  return info;
}

void record(Context& context, const char* op, std::span<Tensor> inputs) {
  NodeAccess::start(context);
  Context::Impl& impl = *NodeAccess::impl(context);
  impl.op = op;
  impl.inputs.reserve(inputs.size());
  for (const Tensor& x : inputs) impl.inputs.push_back(describe(x));
}

bool any_requires_grad(std::span<Tensor> inputs) {
  for (const Tensor& x : inputs) {
    if (x.requires_grad()) return true;
  }
  return false;
}

Tensors parameters_of(std::span<const Tensor> inputs) {
  Tensors parameters;
  for (const Tensor& x : inputs) {
    if (x.defined() && is_parameter(x)) parameters.push_back(x);
  }
  return parameters;
}

}  // namespace

namespace detail {

struct Application::Observation {
  OpObserver* observer;
  OpEvent event;
  Tensors inputs, parameters;  // what the event's spans show
  std::int64_t begin_ns = 0;
};

Application::Application(const OpInfo& info, std::span<Tensor> inputs)
    : info_(info),
      inputs_(inputs),
      previous_grad_mode_(local().grad_enabled),
      recall_(info.converts ? nullptr : local().recall) {
  check_inputs(info, inputs);
  if (OpObserver* observer = local().observer) {
    observation_ = std::make_unique<Observation>(
        Observation{observer, {}, Tensors(inputs.begin(), inputs.end()), parameters_of(inputs)});
  }
  cast_inputs(info, inputs, observation_ ? &observation_->event : nullptr);
  if (inputs[0].device().is_cuda()) device_.emplace(inputs[0].device());
  if (MemoryCategoryGuard::current() == MemoryCategory::other) {
    category_.emplace(MemoryCategory::activations);
  }
  if (previous_grad_mode_ && any_requires_grad(inputs)) record(context_, info.name, inputs);
  previous_recall_ = std::exchange(local().recall, nullptr);
  local().grad_enabled = false;
}

Application::~Application() {
  local().grad_enabled = previous_grad_mode_;
  local().recall = previous_recall_;
}

Tensor Application::recalled() {
  Tensor y = recall_ != nullptr ? recall_->recall(info_.name, inputs_) : Tensor();
  if (y.defined()) {
    recall_ = nullptr;
    observation_ = nullptr;
  }
  if (observation_) open_event();
  using Kind = core::ObservedWork::Kind;
  if (!y.defined())
    span_.emplace(local().recomputing ? Kind::recompute : Kind::forward, info_.name,
                  inputs_[0].device());
  return y;
}

void Application::open_event() {
  OpEvent& event = observation_->event;
  event.name = info_.name;
  event.phase = local().recomputing ? Phase::recompute : Phase::forward;
  event.device = inputs_[0].device();
  event.dtype = inputs_[0].dtype();
  for (const Tensor& x : inputs_) {
    if (!x.defined() || !core::is_floating(x.dtype())) continue;
    event.dtype = x.dtype();
    break;
  }
  event.inputs = observation_->inputs;
  event.parameters = observation_->parameters;
  observation_->observer->begin(event);
  observation_->begin_ns = now_ns();
}

void Application::close_event(const Tensor& y, const Context::Impl* impl) {
  OpEvent& event = observation_->event;
  event.host_ns = now_ns() - observation_->begin_ns;
  event.bytes_out = static_cast<std::int64_t>(y.nbytes());
  event.bytes_saved = impl != nullptr ? impl->bytes_saved : 0;
  event.outputs = {&y, 1};
  observation_->observer->end(event);
}

void Application::finish(Tensor& y, std::shared_ptr<Node> node) {
  Context::Impl* impl = node ? NodeAccess::impl(*node) : nullptr;
  if (observation_) close_event(y, impl);
  if (recall_ != nullptr) recall_->ran(y);
  if (impl == nullptr || !core::is_floating(y.dtype())) return;
  for (const Tensor& x : inputs_) {
    if (y.same(x)) y = y.detach();  // an input keeps its own graph
  }
  impl->sequence = next_sequence();
  impl->shape = y.shape();
  impl->dtype = y.dtype();
  impl->device = y.device();
  y.set_requires_grad(true);
  y.attachments().graph = std::move(node);
}

}  // namespace detail

OpRecallGuard::OpRecallGuard(OpRecall* recall) : previous_(std::exchange(local().recall, recall)) {}
OpRecallGuard::~OpRecallGuard() {
  local().recall = previous_;
}

const char* name(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::recompute:
      return "recompute";
  }
  return "unknown";
}

OpObserver* set_observer(OpObserver* observer) {
  return std::exchange(local().observer, observer);
}

}  // namespace cairn::autograd
