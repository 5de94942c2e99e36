// An optimizer's or amp's step on every rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "backward_command.h"
#include "cairn/core/error.h"
#include "commands.h"

namespace cairn::stateful {

class TakeStep : public Command {
 public:
  explicit TakeStep(Step step) : step_(step) {
    if (!step_.by_amp) step_.optimizer = std::max(step_.optimizer, 0);
  }

  bool possible(const Case& now) const override {
    if (step_.optimizer >= static_cast<int>(now.setup.rules.size())) return false;
    if (step_.by_amp && !now.setup.precision) return false;
    const bool several = now.setup.rules.size() > 1;
    if (step_.by_amp && several && plain_overflow(now.reference)) return false;
    if (step_.keep && !keeps(now)) return false;
    if (step_.optimizer >= 0) return true;
    for (const Answer skip : now.reference.skips) {
      if (skip == Answer::either) return false;
    }
    for (const Pending& loss : now.reference.pending) {
      if (loss.overflow && loss.doubtful) return false;
    }
    return true;
  }

  void run(Case& now) const override {
    Reference& reference = now.reference;
    const unsigned which = step_.optimizer < 0 ? now.all_optimizers() : bit(step_.optimizer);
    const bool empty = !reference.any_gradient(which);
    const Expectation expected = expectation(now, which);
    const double gradient_scale = step_.window > 0 ? 1.0 / step_.window : 1.0;
    const double norm = step_.optimizer < 0 ? 0.0 : gradient_scale * reference.norm(which);
    const System::Outcome outcome = now.system.each([&](Rank& rank) { return rank.step(step_); });
    if (now.setup.ranks > 1 && now.setup.ddp) reference.summed = now.setup.wiring.sum;
    if (outcome.gave_up()) {  // its scales may have heard of it
      reference.doubt_scales(reference.scales);
      return clear_module(now);
    }
    if (outcome.threw()) {
      if (!expected.may_throw && !expected.must_throw) {
        throw Mismatch("expected no error, got: " + outcome.error);
      }
      return now.check();
    }
    if (expected.must_throw) throw Mismatch("expected an error: " + expected.why);
    reference.ranks_differ = false;  // it has reduced them
    now.reduced_by(which);
    const bool applied = outcome.numbers[0] != 0;
    reference.each_of(which, [&](Parameter& p) { p.gradient.scale(gradient_scale); });
    take(now, which, applied, expected);
    if (empty && applied) throw Mismatch("a step without any gradient was applied");
    if (applied && step_.optimizer >= 0 && !now.coarse()) {
      compare("norm of the gradients", {outcome.numbers[1]}, {norm},
              now.travels_rounded() ? 1e-3 : kExact);
    }
    for (std::size_t o = 0; o < reference.positions.size(); ++o) {
      if (step_.schedule && applied && (which & bit(static_cast<int>(o))) != 0) {
        ++reference.positions[o];
      }
    }
    now.check({now.coarse() || now.travels_rounded() ? kAll : 0,
               now.travels_rounded() ? DType::f16 : DType::f32});
  }

  void show(std::ostream& out) const override {
    out << (step_.by_amp ? "precision.step(" : "optimizer.step(");
    if (step_.optimizer >= 0) out << "optimizer " << step_.optimizer;
    if (step_.max_norm > 0) out << (step_.optimizer >= 0 ? ", " : "") << "clip " << step_.max_norm;
    if (step_.per_group) out << " of each group";
    if (step_.keep) out << ", keep_gradients";
    out << ")" << (step_.schedule ? " and schedule" : "");
  }

 private:
  /// A loss's scale hears of it once, in the first step.
  bool keeps(const Case& now) const {
    const auto& all = now.reference.parameters;
    return std::all_of(all.begin(), all.end(),
                       [](const Parameter& p) { return p.gradient.finite(); }) &&
           std::all_of(now.reference.pending.begin(), now.reference.pending.end(),
                       [](const Pending& p) { return !p.overflow && !p.doubtful; }) &&
           step_.window == 0;
  }

  struct Expectation {
    bool may_throw = false, must_throw = false;
    bool scales_known = true;
    std::string why;
  };

  Expectation expectation(Case& now, unsigned which) const {
    Expectation expected;
    bool plain = false, scaled = false, by_amp = false;
    now.reference.each_of(which, [&](const Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      plain = plain || p.gradient.plain;
      scaled = scaled || p.gradient.scaled;
      by_amp = by_amp || !p.gradient.plain;
    });
    const bool scales = now.setup.precision && now.reference.scales[0].value != 1.0;
    if (step_.by_amp && plain) {
      expected.must_throw = scales;
      expected.may_throw = true;
      expected.scales_known = false;
      expected.why = "gradients of a plain backward in amp's step, at a loss scale";
    }
    if (!step_.by_amp && scaled) {
      expected.must_throw = true;
      expected.why = "gradients that amp has scaled in the optimizer's own step";
    }
    const bool empty = !now.reference.any_gradient(which);
    const bool foreign = !step_.by_amp && now.setup.precision && by_amp;
    expected.may_throw = expected.may_throw || now.reference.may_refuse || empty || foreign;
    if (empty) {
      for (const Pending& loss : now.reference.pending) {
        if ((loss.optimizers & which) != 0) expected.scales_known = false;
      }
    }
    return expected;
  }

  static bool plain_overflow(const Reference& reference) {
    return std::any_of(reference.parameters.begin(), reference.parameters.end(),
                       [](const Parameter& p) { return p.gradient.plain_overflow(); });
  }

  bool finite(Reference& reference, unsigned which) const {
    return std::isfinite(reference.norm(which));
  }

  /// What the step did, in the reference.
  void take(Case& now, unsigned which, bool applied, const Expectation& expected) const {
    Reference& reference = now.reference;
    bool known = expected.scales_known;
    std::vector<Answer> skips(now.setup.rules.size(), Answer::no);
    const std::vector<Scale> before = reference.scales;
    if (step_.by_amp) skips = reference.judge(which, known);
    bool all = true, some_empty = false;
    for (int o = 0; o < static_cast<int>(now.setup.rules.size()); ++o) {
      if ((which & bit(o)) == 0) continue;
      if (!reference.any_gradient(bit(o))) {
        some_empty = true;
        continue;
      }
      if (!finite(reference, bit(o))) {
        known = known && skips[at(o)] != Answer::no;
        skips[at(o)] = Answer::yes;
      }
      if (skips[at(o)] == Answer::either) skips[at(o)] = applied ? Answer::no : Answer::yes;
      all = all && skips[at(o)] == Answer::no;
      if (skips[at(o)] == Answer::no) reference.update(o, step_.max_norm, step_.per_group);
    }
    if (step_.keep) {  // who skips for a loss keeps its gradients, and will skip again
      for (std::size_t o = 0; o < skips.size(); ++o) {
        if ((which >> o & 1U) != 0) reference.skips[o] = skips[o];
      }
    } else if (step_.by_amp) {
      reference.each_of(which, [](Parameter& p) { p.gradient = {}; });
    } else {
      reference.clear(which);  // amp has not heard of it
    }
    if (!now.any_gradient()) now.backwards = 0;
    if (!known) reference.doubt_scales(before);
    if (!some_empty && applied != all) {
      throw Mismatch(all ? "expected the step to be applied, got a skip"
                         : "expected a skip, got a step that was applied");
    }
  }

  Step step_;
};

}  // namespace cairn::stateful
