// What a step does: everything that was found, agreed over ranks, decides who updates and who
// skips, and what becomes of the scales.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "amp_impl.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"

namespace cairn::amp {

namespace {

/// Who holds one of them and steps later knows from it whether to skip.
EndedLosses mark_judged(const HeldContributions& judged, const StepReport& all) {
  EndedLosses ended;
  auto overflowed = all.overflowed.begin();
  for (const LossContributionPtr& one : judged) {
    if (*overflowed++) one->overflowed = true;
    one->judged = true;
    one->over = !one->overflowed;
    ended[one->loss_id] = one;
  }
  return ended;
}

/// What all ranks found, where this step judged it; else what this optimizer's own check did.
void explain_skip(const std::string& reason, const StepReport& all, optim::StepResult& result) {
  if (!reason.empty()) {
    result.reason = reason;
    const std::vector<Culprit>& first = all.overflows.begin()->second;
    result.culprit = first.empty() ? "" : first.front().parameter;
  } else if (result.reason.empty()) {
    result.reason = "a loss overflowed in the step of another optimizer";
  }
}

std::set<int> sorted(const std::vector<int>& ranks) {
  return {ranks.begin(), ranks.end()};
}

/// " (ranks 0, 1, 2)"; nothing where nobody knows.
std::string in_words(const std::set<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? " (ranks " : ", ") + std::to_string(rank);
  return text.empty() ? text : text + ")";
}

}  // namespace

/// What this rank found: which losses overflowed, which optimizers hold gradients of these.
StepReport Amp::Impl::found_by(const LossContributions::Resolved& resolved,
                               const std::vector<std::size_t>& which) const {
  StepReport found;
  for (const LossContributionPtr& one : resolved.unjudged) {
    found.losses_ended += (found.losses_ended.empty() ? "" : ", ") + one->describe();
    one->overflowed = !one->nonfinite.empty();
    found.overflowed.push_back(one->overflowed);
    for (const optim::NonFinite& n : one->nonfinite) {
      found.overflows[one->loss_id].push_back({n.parameter, 0, n.inf, n.nan});
    }
  }
  for (std::size_t index = 0; index < contributions.size(); ++index) {
    const auto held = contributions.held_by(index);
    found.optimizers.push_back(
        std::any_of(held.begin(), held.end(), [](const auto& one) { return one->overflowed; }));
  }
  for (std::size_t k = 0; k < which.size(); ++k) {
    if (!resolved.reports[k].finite()) found.optimizers[which[k]] = true;
    found.in_parts = found.in_parts || resolved.reports[k].of_parts != nullptr;
  }
  return found;
}

/// Ranks that step by themselves, or with some of those alone with which they average, would not
/// know of all overflows. A world of more ranks does no harm.
void Amp::Impl::check_world(const optim::Optimizer& optimizer) const {
  const World& world = options.world;
  const std::set<int> known = sorted(world.job_ranks());
  std::shared_ptr<core::GradientReducer> checked;
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const auto& [name, tensor] : group.parameters) {
      const core::GradientSlot* slot = tensor.gradient_slot_or_null();
      const auto reducer = slot == nullptr ? nullptr : slot->reducer();
      if (reducer == nullptr || reducer == checked) continue;
      checked = reducer;
      const auto* ranks = dynamic_cast<const core::RankSet*>(reducer.get());
      const std::set<int> needed = ranks == nullptr ? std::set<int>{} : sorted(ranks->job_ranks());
      const bool all = world.size > 1 &&
                       (known.empty() ||
                        std::includes(known.begin(), known.end(), needed.begin(), needed.end()));
      CAIRN_CHECK(all, "step", "expected amp::Options::world of the ranks over which the gradient ",
                  "of '", name, "' is averaged", in_words(needed), ", got a world of ",
                  world.size == 1 ? "one" : core::str(world.size), in_words(known),
                  " (amp::initialize(..., {.world = ddp.world()}))");
    }
  }
}

void Amp::Impl::check_step(const std::vector<std::size_t>& which,
                           const optim::StepOptions& step_options) {
  CAIRN_CHECK(!released, "step",
              "expected a handle whose models are initialized, got a released one");
  // All ranks have then what some have, or refuse it together.
  for (const std::size_t index : which)
    optim::OptimizerAccess(contributions[index]).wait_for_reductions();
  CAIRN_CHECK(step_options.check || !options.dynamic_loss_scale, "step",
              "expected check = true with a dynamic loss scale, got false (it needs to know of "
              "overflows; a static loss_scale may go unchecked)");
}

void Amp::Impl::check_losses(const std::vector<std::size_t>& which) const {
  for (const std::size_t index : which) {
    check_world(contributions[index]);
    optim::OptimizerAccess(contributions[index]).check_scaler(scaler_id());
    for (const LossContributionPtr& held : contributions.held_by(index)) {
      CAIRN_CHECK(held->judged || !held->unscale_delayed, "step",
                  "expected a last backward without delay_unscale, got one with it (loss ",
                  held->loss_id, ")");
    }
  }
}

std::string Amp::Impl::judge(const LossContribution& ended, const StepReport& all) {
  const int id = ended.loss_id;
  Loss& loss = losses[static_cast<std::size_t>(id)];
  const auto found = all.overflows.find(id);
  const bool overflow = found != all.overflows.end();
  const bool at_minimum = loss.scaler.at_minimum();
  const double before = loss.scaler.scale();
  if (ended.check_delayed) {
    loss.carried = loss.carried || overflow;
  } else {
    loss.scaler.update(overflow || loss.carried);
    loss.carried = false;
  }
  if (!overflow) {
    loss.collapsing.clear();
    return {};
  }
  if (!at_minimum) loss.collapsing.clear();
  if (at_minimum) loss.collapsing.add(parameters_of(found->second));
  const Overflow record{steps, id, ended.scale, found->second};
  overflows.push_back(record);
  while (static_cast<int>(overflows.size()) > options.overflow_history) overflows.pop_front();
  return core::str(options.num_losses > 1 ? core::str("loss ", id, ": ") : std::string(),
                   record.describe(options.world.size), "; ", scale_change(before, loss.scaler));
}

std::string Amp::Impl::fall_back_if_due(const EndedLosses& losses_ended, const StepReport& all) {
  for (const auto& [id, ended] : losses_ended) {
    if (!all.overflows.contains(id)) fallback.stepped(id);
  }
  if (all.overflows.empty()) return {};
  const auto& [id, culprits] = *all.overflows.begin();
  const bool at_minimum = losses[static_cast<std::size_t>(id)].scaler.at_minimum();
  const std::string layer = fallback.overflowed(id, all.layer, culprits, at_minimum);
  if (layer.empty()) return {};
  refresh_optimizers();
  log::warn("amp: layer {} overflowed {} times in a row and runs in f32 from now on", layer,
            options.fallback_after);
  return "; layer " + layer + " runs in f32 from now on";
}

void Amp::Impl::refresh_optimizers() {
  for (optim::Optimizer* optimizer : contributions.optimizers())
    optim::OptimizerAccess(*optimizer).refresh();
}

void Amp::Impl::throw_if_collapsed() {
  for (std::size_t id = 0; id < losses.size(); ++id) {
    Loss& loss = losses[id];
    if (options.collapse_after == 0 || loss.collapsing.length() < options.collapse_after) continue;
    const optim::SkipStreak streak = std::exchange(loss.collapsing, {});
    throw LossScaleCollapse(
        core::str("[amp] expected a finite step, got ", streak.length(), " overflows in a row",
                  losses.size() > 1 ? core::str(" of loss ", id) : std::string(),
                  " with the loss scale at ", number(loss.scaler.scale()),
                  loss.scaler.dynamic() ? " (its minimum)" : " (static)", ", the last in step ",
                  steps, ". The gradients of ", streak.describe(), " overflowed each time. ",
                  optim::kCollapseAdvice,
                  "; half_dtype bf16 has the range of f32, and fallback_after puts a layer "
                  "that overflows into f32)"),
        streak.parameters());
  }
}

/// Nothing is written before there is memory for the updates of all.
std::vector<optim::StepResult> Amp::Impl::update(const std::vector<std::size_t>& which,
                                                 const LossContributions::Resolved& resolved,
                                                 const StepReport& all,
                                                 const optim::StepOptions& step_options) {
  std::vector<optim::StepOptions> own(which.size(), step_options);
  std::vector<optim::OptimizerAccess::Update> updates(which.size());
  for (std::size_t k = 0; k < which.size(); ++k) {
    own[k].gradient_scale /= resolved.scales[k];
    if (all.optimizers[which[k]]) continue;  // skips
    const optim::OptimizerAccess optimizer(contributions[which[k]]);
    updates[k] = optimizer.begin_update(resolved.reports[k], own[k]);
  }
  std::vector<optim::StepResult> results;
  for (std::size_t k = 0; k < which.size(); ++k) {
    optim::Optimizer& optimizer = contributions[which[k]];
    results.push_back(all.optimizers[which[k]]
                          ? optimizer.skip(resolved.reports[k], own[k])
                          : optim::OptimizerAccess(optimizer).end_update(updates[k]));
  }
  return results;
}

std::vector<optim::StepResult> Amp::Impl::step(const std::vector<std::size_t>& which,
                                               optim::StepOptions step_options) {
  const optim::SharedStep shared(contributions.optimizers());
  check_step(which, step_options);
  if (step_options.max_gradient_norm == 0) {
    step_options.max_gradient_norm = options.max_gradient_norm;
  }
  if (device) return step_on_device(which, step_options);
  ++steps;
  LossContributions::Resolved resolved;
  const auto find = [&] {
    check_losses(which);
    resolved = contributions.resolve(which, step_options);
    StepReport own = found_by(resolved, which);
    own.layer = fallback.culprit();
    return own;
  };
  const StepReport all = step_options.check ? agree(find, options.world) : find();
  const EndedLosses losses_ended = mark_judged(resolved.unjudged, all);
  std::string reason;
  for (const auto& [id, ended] : losses_ended) {
    const std::string said = judge(*ended, all);
    reason += (reason.empty() || said.empty() ? "" : "; ") + said;
  }

  std::vector<optim::StepResult> results = update(which, resolved, all, step_options);
  for (std::size_t k = 0; k < which.size(); ++k) {
    if (all.optimizers[which[k]]) explain_skip(reason, all, results[k]);
  }
  const std::string fell = fall_back_if_due(losses_ended, all);
  for (optim::StepResult& result : results) result.reason += fell;
  throw_if_collapsed();
  return results;
}

}  // namespace cairn::amp
