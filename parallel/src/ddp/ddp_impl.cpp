#include "ddp/ddp_impl.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/scaler.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/parallel/flatten.h"
#include "ddp/likely_mistakes.h"
#include "ddp/model_sync.h"
#include "ddp/names.h"

namespace cairn::parallel {
namespace {

constexpr std::int64_t kGapBytes = 63;  // the arena aligns its slots to 64
constexpr const char* kReach = "which parameters losses reach";
constexpr const char* kLeft = "what backwards without a reduction have left";
constexpr char kHasSum = 's', kNoSum = '-';
constexpr std::size_t kSlotsLength = 3;  // of own_slots()
constexpr char kRefusal = '!';           // in its place, before why
constexpr char kPlanned = 'p', kUnplanned = 'u';

DistributedOptions of_the_reducer(DistributedOptions options) {
  options.find_unused_parameters = options.static_graph = options.broadcast_buffers = false;
  return options;
}

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

}  // namespace

DistributedDataParallel::Impl::Impl(nn::Module& m, ProcessGroup g, const DistributedOptions& o)
    : model(&m),
      group(std::move(g)),
      options(o),
      reducer(group, of_the_reducer(o)),
      parameters(m.parameters()),
      buffers(m.buffers()),
      arena(optim::GradientArena::attach(parameters)) {
  for (const std::string& trigger : options.trigger_parameters) {
    const auto names = names_of(parameters);
    CAIRN_CHECK(std::find(names.begin(), names.end(), trigger) != names.end(), "ddp",
                "expected trigger_parameters to be the model's, got '", trigger, "'");
  }
  reducer.before_reduction(
      [this](const std::vector<std::size_t>& places) { before_reduction(places); });
  plan();
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
    hooks.push_back(
        autograd::on_gradient_ready(tensor, [this](const Tensor& leaf) { on_ready(leaf); }));
  }
}

bool DistributedDataParallel::Impl::is_reduced(const Tensor& parameter) const {
  return parameter.requires_grad() && optim::GradientArena::of(parameter) == arena &&
         parameter.gradient_slot().placed();
}

void DistributedDataParallel::Impl::plan() {
  trained.clear();
  gradient_of.clear();
  std::vector<std::string> names;
  std::vector<TensorView> views;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Tensor& tensor = parameters[p].tensor;
    if (!is_reduced(tensor)) continue;
    gradient_of[tensor.id()] = trained.size();
    trained.push_back(p);
    names.push_back(parameters[p].name);
    views.push_back(tensor.gradient_slot().memory());
  }
  reducer.register_gradients(names, views, {.gap_bytes = kGapBytes, .partial = true});
  graph_known = false;
  static_reached.clear();
  planned_generation = arena->generation();
  agreed = false;
}

/// Every rank, or none. A parameter that was unfrozen or cast on some ranks only would be waited for without end.
void DistributedDataParallel::Impl::plan_anew() {
  if (group.world_size() > 1) check_same_model(*model, group);
  plan();
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
  local_checks = {};
  arena = optim::GradientArena::attach(parameters);
  connect();
  planned_generation = 0;
}

void DistributedDataParallel::Impl::forward_begins(const Tensor& x) {
  follow_model(false);
  const bool in_training = group.world_size() > 1 && reduces() && model->training();
  if (in_training && !batches_known && first_batch.empty()) first_batch = digest_of_batch(x);
  if (!in_training || !options.broadcast_buffers || buffers.empty()) return;
  if (uneven) announce('f');
  sync_buffers(0);
}

void DistributedDataParallel::Impl::sync_buffers(int root) {
  if (group.world_size() == 1) return;
  broadcast_parameters(model->buffers(), group, root);
  group.wait();
}

// ---- A backward

void DistributedDataParallel::Impl::on_ready(const Tensor& parameter) {
  if (seen_run != autograd::current_run()) {
    scale = parameter.gradient_slot().scale();
    seen_run = autograd::current_run();
    check_what_is_left();
  }
  if (!reduces()) return;
  if (run != autograd::current_run()) begin();
  const auto gradient = gradient_of.find(parameter.id());
  if (gradient != gradient_of.end() && !late) reducer.mark_ready(gradient->second);
}

/// Where ranks may reach other parameters, one whose loss reaches a gradient that is broken, or that another scaler's loss has left,
/// cannot begin its backward; nor may the others, who would wait for it.
void DistributedDataParallel::Impl::check_what_is_left() {
  using State = core::GradientSlot::State;
  for (std::size_t i = 0; finds_unused() && i < trained.size(); ++i) {
    core::GradientSlot& slot = slot_of(i);
    const bool holds = slot.state() != State::writing && (slot.holds_gradient() || slot.has_sum());
    const bool other = holds && !core::is_same_scaler(slot.scale().scaler, scale.scaler);
    if (!other && slot.state() != State::broken) continue;
    if (slot.claim(std::make_shared<char>())) continue;  // nobody would have stepped it
    const std::string& name = parameter_of(i).name;
    if (!other) refuse(core::str("a broken gradient of '", name, "'"));
    slot.check_whole(name);
    const auto whose = [](std::uint64_t scaler) {
      return scaler == 0 ? "that nobody scaled" : "that an amp::Amp scaled";
    };
    const std::string why = core::str(
        "expected gradients ", whose(slot.scale().scaler), " in '", name, "', got a loss ",
        whose(scale.scaler),
        " (precision.backward() for every loss of a step; or step, or clear_grad(), first)");
    refuse(why);
    core::fail("ddp", why);
  }
}

void DistributedDataParallel::Impl::begin() {
  meet();
  run = told_run = autograd::current_run();
  met = false;
  local_checks.begin_pass();
  autograd::on_backward_end([this] { finish(); },
                            [this](const std::string& error) { break_off(error); });
  if (finds_unused()) mark_what_is_not_reached();
}

/// What the ranks tell each other at the start of a backward that reduces.
void DistributedDataParallel::Impl::meet() {
  follow_model(true);
  if (arena->stale()) arena->refresh();
  begin_joined();
  if (!std::exchange(batches_known, true)) warn_of_same_batches(first_batch, group);
  if (finds_unused()) return;
  if (accumulated) return agree_after_no_sync();
  if (!has_plan()) plan_anew();
}

/// A rank may have lost what others keep: their slots may have turned to f32, and have a sum beside them.
void DistributedDataParallel::Impl::agree_after_no_sync() {
  follow_slots(group.exchange(own_slots(), kLeft));
}

std::string DistributedDataParallel::Impl::own_slots() const {
  return {slots_letter(), has_plan() ? kPlanned : kUnplanned, has_sum() ? kHasSum : kNoSum};
}

/// Where gradients lie on every rank. They plan anew together; those that lie in other dtypes are reduced late.
void DistributedDataParallel::Impl::follow_slots(const std::vector<std::string>& ranks) {
  bool all_planned = true;
  sums_left = false;
  for (const std::string& rank : ranks) {
    late = late || rank.at(0) != ranks[0].at(0);
    all_planned = all_planned && rank.at(1) == kPlanned;
    sums_left = sums_left || rank.at(2) == kHasSum;
  }
  if (!all_planned && !late) plan_anew();
}

bool DistributedDataParallel::Impl::has_sum() const {
  return std::any_of(parameters.begin(), parameters.end(), [](const NamedTensor& parameter) {
    const core::GradientSlot* slot = parameter.tensor.gradient_slot_or_null();
    return slot != nullptr && slot->has_sum();
  });
}

void DistributedDataParallel::Impl::break_off(const std::string& error) {
  run = 0;
  agreed = late = false;
  apart = true;
  reducer.abandon();  // before anybody writes there again
  if (met) group.give_up(core::str("its backward failed: ", error));
}

bool DistributedDataParallel::Impl::asks_what_is_reached() const {
  return finds_unused() && (!options.static_graph || !graph_known || !agreed || !has_plan());
}

/// A backward that cannot begin, or breaks off before it has told anything: the others hear of it where they ask what this rank's
/// loss reaches.
void DistributedDataParallel::Impl::refuse(const std::string& why) {
  if (!reduces() || !asks_what_is_reached()) return;
  const core::RunId current = autograd::current_run();
  if (current != 0 && current == std::exchange(told_run, current)) return;
  meet();
  apart = true;
  group.exchange(kRefusal + why, kReach);
  group.give_up(why);
}

/// The engine has begun the slots of all parameters that the loss reaches.
void DistributedDataParallel::Impl::mark_what_is_not_reached() {
  std::vector<bool> reaches(parameters.size()),
      reached(parameters.size());  // by this loss; by this or an earlier one
  for (std::size_t p = 0; p < reached.size(); ++p) {
    const Tensor& tensor = parameters[p].tensor;
    const core::GradientSlot& slot = tensor.gradient_slot();
    reaches[p] = is_reduced(tensor) && slot.state() == core::GradientSlot::State::writing;
    reached[p] = reaches[p] || (is_reduced(tensor) && slot.holds_gradient());
  }
  const bool asks = asks_what_is_reached();
  const std::vector<bool> heard = asks ? exchange_reached(reached) : reached_somewhere;
  if (options.static_graph) check_static(reaches);
  reached_somewhere = heard;
  graph_known = true;
  unused.clear();
  for (std::size_t i = 0; i < trained.size(); ++i) {
    if (reaches[trained[i]]) continue;
    if (!reached[trained[i]]) unused.push_back(parameter_of(i).name);
    if (late) continue;
    if (reached[trained[i]]) {
      reducer.mark_ready(i);  // what an earlier backward left here
    } else {
      mark_unreached(i);
    }
  }
}

void DistributedDataParallel::Impl::mark_unreached(std::size_t gradient) {
  if (reached_somewhere[trained[gradient]]) {
    mark_zero(gradient);
  } else {
    reducer.mark_unused(gradient);
  }
}

/// A zero() reaches everything, which says nothing.
void DistributedDataParallel::Impl::check_static(const std::vector<bool>& reaches) {
  if (shadows()) return;
  if (static_reached.empty()) static_reached = reaches;
  for (std::size_t i = 0; i < reaches.size(); ++i) {
    if (reaches[i] == static_reached[i] && (!graph_known || !reaches[i] || reached_somewhere[i]))
      continue;
    fail_everywhere(core::str(
        "expected the loss to reach the same parameters in every backward (static_graph), got '",
        parameters[i].name, "', which ",
        reaches[i] ? "the first one did not reach" : "only the first one reached"));
  }
}

/// What all ranks reach, by parameter. What they have of earlier backwards may differ, and with it where gradients lie: they
/// plan anew together.
std::vector<bool> DistributedDataParallel::Impl::exchange_reached(
    const std::vector<bool>& reached) {
  std::string text = own_slots();
  for (const bool bit : reached) text += bit && !shadows() ? '1' : '0';
  met = true;
  const auto ranks = group.exchange(text, kReach);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank][0] == kRefusal)
      core::fail("ddp", "rank ", rank, " gave its backward up: ", ranks[rank].substr(1));
  }
  std::vector<bool> somewhere(reached.size(), false);
  for (const std::string& rank : ranks) {
    for (std::size_t p = 0; p < reached.size(); ++p)
      somewhere[p] = somewhere[p] || rank.at(kSlotsLength + p) == '1';
  }
  follow_slots(ranks);
  return somewhere;
}

/// All slots are written: they may move.
void DistributedDataParallel::Impl::mark_late() {
  late = false;
  arena->use_f32_slots();
  plan_anew();
  for (std::size_t i = 0; finds_unused() && i < trained.size(); ++i) {
    if (!slot_of(i).holds_gradient()) mark_unreached(i);
  }
}

void DistributedDataParallel::Impl::mark_zero(std::size_t gradient) {
  autograd::join_run(parameter_of(gradient).tensor);
  slot_of(gradient).write();
  reducer.mark_unused(gradient);
}

void DistributedDataParallel::Impl::before_reduction(const std::vector<std::size_t>& places) {
  met = true;
  if (options.check_local_gradients) {
    std::vector<std::size_t> which;
    std::vector<TensorView> views;
    for (const std::size_t i : places) {
      which.push_back(trained[i]);
      views.push_back(slot_of(i).memory());
    }
    local_checks.check(which, views);
  }
  for (const std::size_t i : places) {
    core::GradientSlot& slot = slot_of(i);
    if (slot.holds_reduced() && !keeps_reduced()) kernels::fill(slot.memory(), 0.0);
    slot.mark_reduced();
  }
}

void DistributedDataParallel::Impl::finish() {
  if (late) mark_late();
  std::vector<std::size_t> without_gradient;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < trained.size(); ++i) {
    if (reducer.is_marked(i) || slot_of(i).holds_gradient()) continue;
    without_gradient.push_back(i);
    names.push_back(parameter_of(i).name);
  }
  if (!names.empty() && !finds_unused())
    fail_everywhere(core::str("expected a gradient for every parameter, got none for ",
                              join_names(names), " on rank ", group.rank(),
                              " (freeze them with set_requires_grad(false), or set "
                              "find_unused_parameters)"));
  for (const std::size_t i : without_gradient) mark_zero(i);
  for (std::size_t i = 0; i < trained.size(); ++i) {
    if (!reducer.is_marked(i)) reducer.mark_ready(i);  // what an earlier backward left here
  }
  reducer.wait();
  run = 0;
  if (finds_unused()) {
    agreed = agreed && !sums_left;
  } else {
    const bool sums = std::exchange(accumulated, false) ? sums_left : has_sum();
    agreed = agreed || !sums;
  }
  for (std::size_t i = 0; finds_unused() && shadows() && i < trained.size(); ++i) {
    if (!reached_somewhere[trained[i]]) slot_of(i).clear();  // zero() reached it, and no loss did
  }
  if (uneven) uneven->announced.clear();
}

void DistributedDataParallel::Impl::settle() {
  wait_for_reductions();
  if (agreed && reduces()) return;
  share_what_is_local();
  wait_for_reductions();
}

void DistributedDataParallel::Impl::wait_for_reductions() {
  try {
    group.wait();
  } catch (const core::CommunicationError& error) {
    for (const auto& [name, tensor] : parameters) tensor.gradient_slot().mark_broken(error.what());
    throw;
  }
}

// ---- Uneven inputs. Before a collective a rank says which one: 'f' the buffers of a forward, 'b' a backward's, 'd' it
// has no batch and does what the others do.

std::vector<std::string> DistributedDataParallel::Impl::announce(char what) {
  auto heard = group.exchange(core::str(what, uneven->samples), "join");
  char active = 'd';
  for (const std::string& other : heard) {
    if (other[0] == 'd') continue;
    CAIRN_CHECK(active == 'd' || active == other[0], "ddp", "expected the ranks that have a batch ",
                "to be at the same place inside join(), got a forward and a backward");
    active = other[0];
  }
  return heard;
}

void DistributedDataParallel::Impl::begin_joined() {
  if (!uneven) return;
  CAIRN_CHECK(shadows() || !uneven->over, "ddp", "expected no backward after others_go_on() has ",
              "returned false, got one");
  const auto heard = shadows() ? uneven->announced : announce('b');
  double active = 0, samples = 0;
  for (const std::string& other : heard) {
    if (other[0] != 'b') continue;
    active += 1;
    samples += std::stod(other.substr(1));
  }
  const double world = group.world_size();
  if (uneven->divide_by == DivideBy::samples) {
    if (samples <= 0)
      fail_everywhere(
          "expected samples() before a backward inside a join() that "
          "divides by samples, got 0 on every rank");
    const double own = shadows() ? 0.0 : static_cast<double>(uneven->samples);
    reducer.set_weights(own * world / samples, 1.0);
    uneven->samples = 0;
  } else if (uneven->divide_by == DivideBy::participants && options.average) {
    reducer.set_weights(1.0, world / active);
  }
}

bool DistributedDataParallel::Impl::others_go_on() {
  if (group.world_size() == 1 || uneven->over) return false;
  CAIRN_CHECK(uneven->announced.empty(), "ddp", "expected a backward of zero() after ",
              "others_go_on(), got others_go_on() again");
  uneven->samples = 0;
  while (true) {
    follow_model(false);
    const auto heard = announce('d');
    const auto active = std::find_if(heard.begin(), heard.end(),
                                     [](const std::string& other) { return other[0] != 'd'; });
    uneven->over = active == heard.end();
    if (uneven->over) return false;
    if ((*active)[0] == 'b') {
      uneven->announced = heard;
      return true;
    }
    sync_buffers(static_cast<int>(active - heard.begin()));
  }
}

}  // namespace cairn::parallel
