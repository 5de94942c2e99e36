#include "ddp/ddp.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "cairn/parallel/flatten.h"
#include "ddp/model_sync.h"
#include "reducer/names.h"
#include "reducer/shard_groups.h"

namespace cairn::parallel {
namespace {

constexpr std::int64_t kGapBytes = 63;  // the arena aligns its slots to 64

bool same_tensors(const NamedTensors& a, const NamedTensors& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(),
      [](const NamedTensor& x, const NamedTensor& y) { return x.tensor.same(y.tensor); });
}

NamedTensors without(const NamedTensors& all, const NamedTensors& known) {
  std::unordered_set<const void*> ids;
  for (const NamedTensor& x : known) ids.insert(x.tensor.id());
  NamedTensors rest;
  for (const NamedTensor& x : all) {
    if (!ids.contains(x.tensor.id())) rest.push_back(x);
  }
  return rest;
}

std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& x : tensors) names.push_back(x.name);
  return names;
}

TensorView without_memory(const Tensor& like, DType dtype) {
  return {nullptr, like.shape(), like.strides(), dtype, like.device()};
}

/// A sum cannot be added to: ranks would count each other's part again.
void check_not_summed(const core::GradientSlot& slot, const std::string& name) {
  CAIRN_CHECK(!slot.adds_to_reduced(), "ddp",
              "expected one reducing backward a step, the last one, ",
              "with average = false, got another backward after '", name,
              "' had been summed over the ranks (no_sync for all but the last; or average = true)");
}

ReducerOptions reducer_options(const ShardedOptions& options, bool shards_gradients) {
  ReducerOptions of_reducer = options.distributed.of_reducer();
  of_reducer.shard = shards_gradients;
  of_reducer.shard_within = shards_gradients ? options.shard_within : 0;
  return of_reducer;
}

}  // namespace

DistributedDataParallel::Impl::Impl(nn::Module& m, ProcessGroup g, const ShardedOptions& o,
                                    std::optional<ZeroStage> s)
    : model(&m),
      group(std::move(g)),
      options(o.distributed),
      stage(s),
      shards(stage ? shard_group(group, o.shard_within) : group),
      near(stage == ZeroStage::parameters ? shard_group(shards, o.reshard_within, "reshard_within")
                                          : shards),
      reducer(group, reducer_options(o, shards_gradients())),
      reducer_world(reducer.world()),
      parameters(m.parameters()),
      buffers(m.buffers()),
      arena(attach_arena()),
      unused(options.static_graph) {
  check_communicators(parameters);
  if (stage == ZeroStage::parameters && shards.world_size() > 1)
    units = std::make_shared<WeightUnits>(m, group, shards, near, o);
  for (const std::string& trigger : options.trigger_parameters) {
    const auto names = names_of(parameters);
    CAIRN_CHECK(std::find(names.begin(), names.end(), trigger) != names.end(), "ddp",
                "expected trigger_parameters to be the model's, got '", trigger, "'");
  }
  if (shards_gradients()) {
    reducer.on_part(
        [this](std::size_t gradient, const Tensor& part) { keep_part(gradient, part); });
  } else {
    reducer.before_reduction([this](const std::vector<std::size_t>& places) {
      for (const std::size_t i : places) slot_of(i).mark_reduced();
    });
  }
  plan();
}

/// No rank ever has buffers for gradients that ranks divide.
std::shared_ptr<optim::GradientArena> DistributedDataParallel::Impl::attach_arena() const {
  using Nobody = std::weak_ptr<const void>;
  return optim::GradientArena::attach(parameters, /*f32_slots=*/false,
                                      shards_gradients() ? Nobody(without_buffers) : Nobody());
}

/// Gradients outlive the reducer that knows whether they are whole.
DistributedDataParallel::Impl::~Impl() {
  try {
    wait_for_reductions();
  } catch (const core::Error&) {  // their slots say so
  }
}

void DistributedDataParallel::Impl::fail_everywhere(const std::string& message) const {
  group.abort(message);
  core::fail("ddp", message);
}

void DistributedDataParallel::Impl::connect() {
  if (group.world_size() == 1) return;
  hooks.clear();
  for (const auto& [name, tensor] : parameters) {
    tensor.gradient_slot().set_reducer(weak_from_this());
    hooks.push_back(autograd::on_gradient_ready(tensor, [this](const Tensor& leaf) {
      if (units) units->gradient_ready(leaf);  // first: it may have to gather, on every rank
      on_ready(leaf);
    }));
  }
}

bool DistributedDataParallel::Impl::is_reduced(const Tensor& parameter) const {
  return parameter.requires_grad() && optim::GradientArena::of(parameter) == arena &&
         (shards_gradients() || parameter.gradient_slot().placed());
}

/// A collective, so that no rank waits for a gradient which another has frozen or cast.
void DistributedDataParallel::Impl::plan() {
  parameter_of_gradient.clear();
  gradient_of.clear();
  std::vector<std::string> names;
  std::vector<TensorView> views;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Tensor& tensor = parameters[p].tensor;
    if (!is_reduced(tensor)) continue;
    gradient_of[tensor.id()] = parameter_of_gradient.size();
    parameter_of_gradient.push_back(p);
    names.push_back(parameters[p].name);
    views.push_back(shards_gradients() ? without_memory(tensor, arena->gradient_dtype(tensor))
                                       : tensor.gradient_slot().memory());
  }
  reducer.register_gradients(names, views, {.gap_bytes = kGapBytes, .partial = true});
  planned_generation = arena->generation();
}

/// Follows what the user has changed, which all ranks have.
void DistributedDataParallel::Impl::follow_model(bool in_backward) {
  group.check();
  NamedTensors now = model->parameters();
  if (same_tensors(now, parameters)) return;
  const NamedTensors added = without(now, parameters);
  if (in_backward)
    fail_everywhere(core::str("expected ddp(x) to be called before the first backward of a model ",
                              "whose parameters have changed, got a backward with ",
                              added.empty() ? "some removed" : join_names(names_of(added)),
                              " (it gives new ones rank 0's values)"));
  check_communicators(now);
  const NamedTensors all_buffers = model->buffers();
  if (group.world_size() > 1) {
    check_same_model(*model, group);
    broadcast_weights(added, group);
    broadcast_parameters(without(all_buffers, buffers), group);
    group.wait();
    for (const NamedTensor& removed : without(parameters, now))
      removed.tensor.gradient_slot().set_reducer({});
  }
  parameters = std::move(now);
  buffers = all_buffers;
  arena = attach_arena();
  connect();
  planned_generation = 0;
}

// ---- A backward

void DistributedDataParallel::Impl::on_ready(const Tensor& parameter) {
  if (!options.average) check_not_summed(parameter.gradient_slot(), parameter.name());
  if (!no_sync.reduces()) return;
  if (reducing_backward != autograd::current_run()) begin_reducing_backward();
  const auto gradient = gradient_of.find(parameter.id());
  if (gradient != gradient_of.end()) mark_ready(gradient->second);
}

void DistributedDataParallel::Impl::mark_ready(std::size_t gradient) {
  if (!shards_gradients()) return reducer.mark_ready(gradient);
  reducer.mark_ready(gradient, slot_of(gradient).memory());
}

/// What this rank does not keep is given back. Called on the communication stream.
void DistributedDataParallel::Impl::keep_part(std::size_t gradient, const Tensor& part) {
  core::GradientSlot& slot = slot_of(gradient);
  if (const Tensor& whole = slot.memory(); whole.defined())
    whole.storage()->record_use(core::Stream::current(whole.device()));
  slot.keep_part(part);
}

void DistributedDataParallel::Impl::begin_reducing_backward() {
  follow_model(true);
  if (arena->stale()) arena->refresh();
  if (uneven_inputs) {
    const UnevenInputs::Weights weights = uneven_inputs->begin_backward(group, options.average);
    reducer.set_weights(weights.before, weights.after);
  }
  if (!holds_reduced_of_before(parameters)) reducer.forget_local_nonfinite();
  // A Join's zero() is of no loss: nothing is compared there.
  const std::string losses = uneven_inputs ? "" : known_losses(parameters);
  reducer.set_losses(losses);
  first_batch.warn_once_of_same(group);
  if (planned_generation != arena->generation()) unused.forget();
  const ReachedParameters reached = finds_unused() ? reached_parameters() : ReachedParameters{};
  if (finds_unused()) agree_on_unused(reached, losses);
  if (planned_generation != arena->generation()) {
    check_same_model(*model, group, losses);
    plan();
  }
  reducing_backward = autograd::current_run();
  autograd::on_backward_end([this] { end_reducing_backward(); },
                            [this](const std::string& /*error*/) {
                              reducing_backward = 0;
                              reducer.abandon();  // before anybody writes there again
                            });
  if (finds_unused()) mark_unused_parameters(reached);
}

/// The others may wait in a collective of this backward: the group breaks then, and they learn why.
void DistributedDataParallel::Impl::backward_failed(const std::string& why) {
  if (no_sync.reduces() && !core::capturing())
    group.give_up(core::str("its backward failed: ", why));
}

/// The engine has begun the slots of all parameters that the loss reaches.
ReachedParameters DistributedDataParallel::Impl::reached_parameters() const {
  ReachedParameters own;
  for (const auto& [name, tensor] : parameters) {
    const core::GradientSlot& slot = tensor.gradient_slot();
    const bool by_loss = is_reduced(tensor) && slot.state() == core::GradientSlot::State::writing;
    own.by_loss.push_back(by_loss);
    own.in_window.push_back(by_loss || (is_reduced(tensor) && slot.holds_gradient()));
  }
  return own;
}

void DistributedDataParallel::Impl::agree_on_unused(const ReachedParameters& own,
                                                    const std::string& losses) {
  const bool shadows = uneven_inputs && uneven_inputs->shadows();
  const HeldGradients held{describe_held_losses(parameters), arena->f32_slots(), {}};
  // Of a static graph's ranks not all may come here: the name tells.
  const std::string name =
      of_losses(options.static_graph ? losses : "", "which parameters losses reach");
  if (unused.agree(own, held, shadows, group, name)) arena->use_f32_slots();
  if (const auto change = shadows ? std::nullopt : unused.changed_since_first(own))
    fail_everywhere(core::str(
        "expected the loss to reach the same parameters in every backward (static_graph), got '",
        parameters[change->parameter].name, "', which ",
        change->reached_now ? "the first one did not reach" : "only the first one reached"));
}

void DistributedDataParallel::Impl::mark_unused_parameters(const ReachedParameters& own) {
  unused.names.clear();
  for (std::size_t i = 0; i < parameter_of_gradient.size(); ++i) {
    const std::size_t parameter = parameter_of_gradient[i];
    if (own.by_loss[parameter]) continue;
    if (own.in_window[parameter]) {
      mark_ready(i);  // what an earlier backward left here
      continue;
    }
    unused.names.push_back(parameter_of(i).name);
    unused.reached_somewhere(parameter) ? mark_zero(i) : reducer.mark_unused(i);
  }
}

/// This rank's part of a gradient that only others have.
void DistributedDataParallel::Impl::mark_zero(std::size_t gradient) {
  autograd::join_run(parameter_of(gradient).tensor);
  slot_of(gradient).write();
  reducer.mark_unused(gradient);
}

void DistributedDataParallel::Impl::end_reducing_backward() {
  std::vector<std::string> without_gradient;
  for (std::size_t i = 0; i < parameter_of_gradient.size(); ++i) {
    if (reducer.is_marked(i)) continue;
    if (slot_of(i).holds_gradient()) {
      mark_ready(i);  // what an earlier backward left here
    } else if (finds_unused()) {
      mark_zero(i);
    } else {
      without_gradient.push_back(parameter_of(i).name);
    }
  }
  if (!without_gradient.empty())
    fail_everywhere(core::str("expected a gradient for every parameter, got none for ",
                              join_names(without_gradient), " on rank ", group.rank(),
                              " (freeze them with set_requires_grad(false), or set "
                              "find_unused_parameters)"));
  reducer.wait();
  reducing_backward = 0;
  if (shards_gradients()) reduce_unreduced();  // sums that no_sync has left, which would be whole
  if (!uneven_inputs) return;
  const bool shadows = finds_unused() && uneven_inputs->shadows();
  for (std::size_t i = 0; shadows && i < parameter_of_gradient.size(); ++i) {
    if (!unused.reached_somewhere(parameter_of_gradient[i]))
      slot_of(i).clear();  // zero() reached it, and no loss did
  }
  uneven_inputs->end_backward();
}

// ---- A step

void DistributedDataParallel::Impl::reduce_pending() {
  wait_for_reductions();
  if (reduce_unreduced()) wait_for_reductions();
}

void DistributedDataParallel::Impl::wait_for_reductions() {
  try {
    group.wait();
  } catch (const core::CommunicationError& error) {
    for (const auto& [name, tensor] : parameters) tensor.gradient_slot().mark_broken(error.what());
    throw;
  }
}

}  // namespace cairn::parallel
