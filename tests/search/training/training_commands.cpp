#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "cairn/core/error.h"
#include "commands.h"
#include "generators.h"

namespace cairn::stateful {

namespace {

constexpr int kMostBackwards = 12;  // before a step: half gradients stay far from their largest

/// Of every parameter, an optimizer's or not.
void clear_module(Case& now) {
  must_not_throw(now.system.each([](Rank& rank) { rank.clear_module(); }));
  now.reference.clear(now.all_optimizers());
  for (Parameter& p : now.reference.parameters) p.gradient = {};
  now.reference.may_refuse = false;
  now.reference.ranks_differ = false;
  now.backwards = 0;
  now.check();
}

// ---- Backward

class Backward : public Command {
 public:
  /// window: the micro-batches are those of an optim::Accumulation.
  Backward(Loss loss, bool synchronise, int micro_batches, bool window = false)
      : loss_(loss), synchronise_(synchronise), micro_batches_(micro_batches), window_(window) {}

  bool possible(const Case& now) const override {
    const auto& parameters = now.reference.parameters;
    const bool overflows = loss_.overflow_rank >= 0;
    const bool throws = loss_.thrower >= 0;
    if (overflows && throws) return false;
    if (loss_.twice && (throws || loss_.apart || (now.setup.wiring.sum && reduces(now))))
      return false;
    const bool plain = loss_.form != Form::norm && !loss_.apart && !loss_.twice;
    if (!plain && !has_cairns_modules()) return false;
    if (!form_is_exact(now)) return false;
    if (loss_.form == Form::norm && (overflows || throws)) return false;
    // Each rank takes part in the others' statistics, and its gradient is theirs too.
    const bool together = loss_.form == Form::norm && now.setup.wiring.sync_norm;
    if (together && now.setup.ranks > 1 && (loss_.odd_reach != 0 || window_)) return false;
    bool all = true;
    for (int rank = 0; rank < 2; ++rank) {
      bool any = false;
      for (int p = 0; p < kParameters; ++p) {
        const bool trains = parameters[at(p)].trainable, reached = loss_.reaches(p, rank);
        any = any || (reached && trains);
        all = all && (!trains || reached);
      }
      if (!any) return false;
    }
    if (now.reference.summed && now.any_gradient()) return false;
    const bool apart = loss_.odd_reach != 0;  // ranks may differ in what they have of it
    if (apart && (now.setup.ranks == 1 || !now.finds_unused() || now.setup.wiring.two_ddps))
      return false;
    if (apart && throws) return false;         // on some ranks alone: OneRankThrows
    if (some_ranks_refuse(now)) return false;  // the group breaks where others wait for them
    if (apart && overflows && !overflow_is_reached()) return false;
    if (now.setup.wiring.static_graph && !is_the_static_one(now)) return false;
    if (window_ && now.setup.ddp && now.setup.wiring.two_ddps) return false;  // whose world?
    if (overflows && !parameters[at(loss_.first())].trainable) return false;
    if (loss_.overflow_rank == 1 && now.setup.ranks == 1) return false;
    if (throws && !loss_.reaches(loss_.thrower)) return false;
    if (throws && !loss_.in_forward && !parameters[at(loss_.thrower)].trainable) return false;
    if (reduces(now) && !now.finds_unused() && !all) return false;
    if (loss_.by_amp != now.setup.precision.has_value() && loss_.by_amp) return false;
    if (loss_.by_amp && takes_plain_gradients_to_an_overflow(now)) return false;
    return now.backwards + (loss_.twice ? 2 : 1) * micro_batches_ <= kMostBackwards;
  }

  void run(Case& now) const override {
    all(now);
    now.check();
  }
  /// false: one of them threw.
  bool all(Case& now) const {
    for (int k = 0; k < micro_batches_; ++k) {
      const bool last = k + 1 == micro_batches_;
      if (!backward(now, synchronise_ && last)) return false;
    }
    return true;
  }

  void show(std::ostream& out) const override {
    out << (micro_batches_ > 1 ? "accumulate" : "backward") << "(loss " << loss_.id << " of "
        << (loss_.reach == 3   ? "a and b"
            : loss_.reach == 1 ? "a"
                               : "b");
    if (loss_.odd_reach != 0) out << ", of " << loss_.odd_reach << " on odd ranks";
    if (loss_.apart) out << ", scale_loss apart";
    if (loss_.twice) out << ", twice";
    if (loss_.form == Form::product) out << ", a product";
    if (loss_.form == Form::tanh) out << ", a product with tanh";
    if (loss_.form == Form::norm) out << ", a batch norm";
    out << ", size " << loss_.size << (loss_.by_amp ? ", by amp" : ", plain");
    if (micro_batches_ > 1) out << ", " << micro_batches_ << " micro-batches";
    if (!synchronise_) out << ", no_sync";
    if (!loss_.by_ddp) out << ", the module called instead of ddp";
    if (!loss_.to_all) out << ", for the optimizers that it reaches";
    if (loss_.delayed) out << ", delay_overflow_check";
    if (loss_.overflow_rank == 2) out << ", inf on every rank";
    if (loss_.overflow_rank >= 0 && loss_.overflow_rank < 2)
      out << ", inf on rank " << loss_.overflow_rank;
    if (loss_.thrower >= 0)
      out << ", throws in " << (loss_.in_forward ? "forward" : "backward") << " at "
          << kNames[at(loss_.thrower)];
    if (loss_.throwing_rank >= 0) out << " on rank " << loss_.throwing_rank;
    out << ")";
  }

 private:
  /// Half arithmetic is known to the last bit for products with powers of two alone: not where
  /// ranks are weighed, and not for tanh.
  bool form_is_exact(const Case& now) const {
    if (loss_.form == Form::linear) return true;
    const bool rounds = now.half() || now.autocasts(loss_);
    return !rounds || (loss_.form == Form::product && !(window_ && now.setup.ranks > 1));
  }
  bool overflow_is_reached() const {
    const int p = loss_.first();
    return loss_.overflow_rank == 0 ? loss_.reaches(p, 0) : loss_.reaches(p, 1);
  }
  /// Only some have a gradient that this loss may not add to: amp looks at those of all optimizers
  /// that were named with it.
  bool some_ranks_refuse(const Case& now) const {
    const unsigned named = loss_.to_all ? now.all_optimizers() : reached_optimizers(now);
    const auto refuses = [&](int rank) {
      for (int p = 0; p < kParameters; ++p) {
        const Parameter& parameter = now.reference.parameters[at(p)];
        const Gradient& gradient = parameter.gradient;
        const bool is_named = parameter.optimizer >= 0 && (named >> parameter.optimizer & 1U) != 0;
        const bool meets =
            parameter.trainable && ((loss_.by_amp && is_named) || loss_.reaches(p, rank));
        // What was reduced is on every rank, whoever's loss reached it.
        const bool held = now.reference.unreduced ? gradient.is_on(rank) : gradient.exists();
        if (meets && held && gradient.plain == loss_.by_amp) return true;
      }
      return false;
    };
    for (int rank = 1; rank < now.setup.ranks; ++rank) {
      if (refuses(rank) != refuses(0)) return true;
    }
    return false;
  }
  bool is_the_static_one(const Case& now) const {
    return loss_.reach == 3 && loss_.odd_reach == now.setup.wiring.static_odd_reach;
  }
  bool reduces(const Case& now) const {
    return now.setup.ranks > 1 && now.setup.ddp && synchronise_;
  }

  /// Gradients of a plain backward wait: whether they count as this loss's, and their optimizers
  /// skip with it, is the library's choice.
  bool takes_plain_gradients_to_an_overflow(const Case& now) const {
    const auto overflows = [](const Pending& loss) { return loss.overflow; };
    const auto waits = [](const Parameter& p) { return p.gradient.exists() && p.gradient.plain; };
    const Reference& all = now.reference;
    return all.rules.size() > 1 &&
           std::any_of(all.parameters.begin(), all.parameters.end(), waits) &&
           (loss_.overflow_rank >= 0 ||
            std::any_of(all.pending.begin(), all.pending.end(), overflows));
  }

  unsigned reached_optimizers(const Case& now) const {
    unsigned reached = 0;
    for (int p = 0; p < kParameters; ++p) {
      const Parameter& parameter = now.reference.parameters[at(p)];
      if (loss_.reaches(p) && parameter.trainable && parameter.optimizer >= 0) {
        reached |= bit(parameter.optimizer);
      }
    }
    return reached;
  }

  /// false: it threw.
  bool backward(Case& now, bool synchronise) const {
    Reference& reference = now.reference;
    const unsigned reached = reached_optimizers(now), declared = loss_.to_all ? 0 : reached;
    Pending pending{loss_.id,      loss_.to_all ? now.all_optimizers() : reached,
                    reached,       loss_.overflow_rank >= 0,
                    loss_.delayed, false};
    const bool scaled = loss_.by_amp && reference.scales[at(loss_.id)].value != 1.0;
    bool mixes = false;
    for (const Parameter& p : reference.parameters) {
      const bool by_amp = p.gradient.exists() && !p.gradient.plain && now.setup.precision;
      mixes = mixes || (loss_.by_amp ? p.gradient.plain : p.gradient.scaled || by_amp);
    }
    now.backwards += loss_.twice ? 2 : 1;
    if (loss_.form == Form::norm) now.follow_batch(loss_);
    const auto work = [&](Rank& rank) {
      if (window_) return rank.accumulate(loss_, synchronise, declared);
      rank.backward(loss_, synchronise, declared);
    };
    const bool broken = loss_.thrower >= 0;
    const System::Outcome outcome = now.system.each(work);
    if (broken && !outcome.threw()) throw Mismatch("expected the error to come out, got none");
    if (broken && loss_.in_forward) return false;
    // What another of amp's losses has left lies beside the slots until a step reduces it, and a
    // DDP reduces what its own module has.
    const bool elsewhere = now.setup.wiring.two_ddps && loss_.reach != 3;
    const bool left =
        (now.setup.precision || elsewhere) && reference.unreduced && now.any_gradient();
    reference.unreduced = now.setup.ranks > 1 && (left || !(reduces(now) && synchronise));
    reference.summed =
        now.setup.wiring.sum && (reduces(now) || (reference.summed && now.any_gradient()));
    if (outcome.threw()) {
      const bool may = broken || mixes || reference.may_refuse;
      if (!may) throw Mismatch("expected no error, got: " + outcome.error);
      // What was there before cannot be told from what was added; what was empty is empty again,
      // but where other ranks may have it: they clear.
      for (const Parameter& p : reference.parameters) {
        reference.may_refuse = reference.may_refuse || (p.trainable && p.gradient.exists());
      }
      // An overflow that was found in a gradient which is broken now is gone with it.
      for (Pending& earlier : reference.pending) earlier.doubtful = true;
      pending.doubtful = true;
      pending.overflow = false;
      pending.optimizers &= reference.with_gradients();
      if (loss_.by_amp) reference.add_pending(pending);
      if (now.setup.ddp && now.setup.ranks > 1) clear_module(now);
      return false;
    }
    for (int p = 0; p < kParameters; ++p) {
      Parameter& parameter = reference.parameters[at(p)];
      if (!parameter.trainable) continue;
      if (loss_.reaches(p)) add(parameter, p, now, scaled);
    }
    if (loss_.by_amp) reference.add_pending(pending);
    reference.ranks_differ = reference.ranks_differ || (loss_.odd_reach != 0 && !reduces(now));
    return true;
  }

  void add(Parameter& parameter, int p, const Case& now, bool scaled) const {
    const int ranks = now.setup.ranks;
    Gradient& gradient = parameter.gradient;
    gradient.plain = gradient.plain || !loss_.by_amp;
    gradient.scaled = gradient.scaled || scaled;
    gradient.of_rank.resize(at(ranks), Values(parameter.weight.size(), 0.0));
    for (int rank = 0; rank < ranks; ++rank) {
      if (!loss_.reaches(p, rank)) continue;
      const Values c = now.gradient_of(loss_, p, rank);
      const double weight =
          now.share() * (window_ ? weight_of(rank, ranks) : 1.0) * (loss_.twice ? 2 : 1);
      for (std::size_t i = 0; i < c.size(); ++i) gradient.of_rank[at(rank)][i] += weight * c[i];
    }
  }

  Loss loss_;
  bool synchronise_;
  int micro_batches_;
  bool window_;
};

// ---- Steps

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
  /// What amp counts for gradients that it has stepped before is nobody's scale to say: a static
  /// one hears of nothing.
  bool keeps(const Case& now) const {
    if (now.setup.precision && now.setup.precision->dynamic) return false;
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

// ---- Ends of other kinds

class AccumulationWindow : public Command {
 public:
  AccumulationWindow(const Loss& loss, int micro_batches, Step step)
      : micro_batches_(loss, true, micro_batches, true), step_(ending(step, micro_batches)) {}
  bool possible(const Case& now) const override {
    return micro_batches_.possible(now) && step_.possible(now);
  }
  void run(Case& now) const override {
    if (micro_batches_.all(now) && step_.possible(now)) return step_.run(now);
    must_not_throw(now.system.each([](Rank& rank) { rank.give_up_window(); }));
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "window: ";
    micro_batches_.show(out);
    out << ", ";
    step_.show(out);
  }

 private:
  static Step ending(Step step, int micro_batches) {
    step.window = micro_batches;
    step.keep = false;
    return step;
  }
  Backward micro_batches_;
  TakeStep step_;
};

/// Ranks with batches of different numbers, under ddp.join(): a step for each of the longest.
class UnevenEpoch : public Command {
 public:
  explicit UnevenEpoch(Epoch epoch) : epoch_(std::move(epoch)) {}
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    if (now.setup.ranks == 1 || now.setup.wiring.two_ddps || now.any_gradient()) return false;
    if (now.setup.wiring.static_odd_reach != 0) return false;
    if (now.setup.wiring.sum && epoch_.divide_by == parallel::DivideBy::samples) return false;
    if (!reference.pending.empty() || reference.may_refuse) return false;
    if (epoch_.by_amp != now.setup.precision.has_value()) return false;
    for (const Answer skip : reference.skips) {
      if (skip != Answer::no) return false;
    }
    for (const Scale& scale : reference.scales) {
      if (!scale.known || scale.carried) return false;
    }
    if (epoch_.freezes_at >= 0 && reference.parameters[at(epoch_.frozen)].trainable == epoch_.thaws)
      return false;
    bool any = false;  // from the first step to the last
    for (int p = 0; p < kParameters; ++p) {
      const Parameter& own = reference.parameters[at(p)];
      const bool changes = epoch_.freezes_at >= 0 && p == epoch_.frozen;
      if ((own.trainable || changes) && own.optimizer < 0) return false;
      any = any || (own.trainable && !changes);
    }
    return any;
  }
  void run(Case& now) const override {
    const System::Outcome outcome = now.system.each([&](Rank& rank) { return rank.epoch(epoch_); });
    must_not_throw(outcome);
    const auto begin = epoch_.batches.begin();
    const int steps = *std::max_element(begin, begin + now.setup.ranks);
    Values applied;
    bool some_idle = false;
    for (int k = 0; k < steps; ++k) some_idle = step(now, k, applied) || some_idle;
    const bool either = epoch_.by_amp && some_idle;  // whether amp's step counts is its choice
    if (!either) compare("applied steps", outcome.numbers, applied, 0.0);
    const bool halves = now.half() || now.autocasts(epoch_.loss);
    const DType half = now.setup.precision ? now.setup.precision->half : now.dtype;
    const bool bf16 = now.setup.bf16_moments || (halves && half == DType::bf16);
    const bool rounds = halves || bf16 || now.travels_rounded();
    now.check({rounds ? kAll : 0, bf16 ? DType::bf16 : DType::f16});
  }
  void show(std::ostream& out) const override {
    const char* const by[] = {"participants", "world", "samples"};
    out << "join(by " << by[static_cast<int>(epoch_.divide_by)] << "), loss " << epoch_.loss.id
        << " of size " << epoch_.loss.size << (epoch_.by_amp ? ", by amp" : ", plain")
        << ", batches";
    for (const int batches : epoch_.batches) out << " " << batches;
    if (epoch_.cleared >= 0) out << ", step " << epoch_.cleared << " cleared";
    if (epoch_.freezes_at >= 0)
      out << ", " << kNames[at(epoch_.frozen)] << (epoch_.thaws ? " thawed" : " frozen")
          << " before step " << epoch_.freezes_at;
  }

 private:
  /// Whether some optimizer had nothing to do.
  bool step(Case& now, int k, Values& applied) const {
    Reference& reference = now.reference;
    const int ranks = now.setup.ranks;
    if (k == epoch_.freezes_at) reference.parameters[at(epoch_.frozen)].trainable = epoch_.thaws;
    const auto weight_of = [&](int rank) {
      if (k >= epoch_.batches[at(rank)]) return 0.0;
      const bool by_samples = epoch_.divide_by == parallel::DivideBy::samples;
      return by_samples ? static_cast<double>(samples_of(rank)) : 1.0;
    };
    double divisor = 0.0;
    for (int rank = 0; rank < ranks; ++rank) divisor += weight_of(rank);
    if (epoch_.divide_by == parallel::DivideBy::world) divisor = ranks;
    if (now.setup.wiring.sum) divisor = 1.0;
    for (int p = 0; p < kParameters; ++p) {
      Parameter& parameter = reference.parameters[at(p)];
      if (!parameter.trainable) continue;
      for (int rank = 0; rank < ranks; ++rank) {
        Values own = epoch_.loss.coefficients(p, rank);
        for (double& g : own) g *= weight_of(rank) * ranks / divisor;
        parameter.gradient.of_rank.push_back(own);
      }
    }
    const unsigned all = now.all_optimizers();
    if (epoch_.by_amp)
      reference.add_pending({.loss = epoch_.loss.id, .given = all, .optimizers = all});
    if (k == epoch_.cleared) reference.clear(now.all_optimizers());
    if (epoch_.by_amp) {
      bool known = true;
      const std::vector<Scale> before = reference.scales;
      reference.judge(now.all_optimizers(), known);
      if (!known) reference.doubt_scales(before);
      applied.push_back(1.0);
    }
    bool some_idle = false;
    for (int o = 0; o < static_cast<int>(now.setup.rules.size()); ++o) {
      const bool steps = reference.any_gradient(bit(o));
      if (steps) reference.update(o, 0.0);
      if (!epoch_.by_amp) applied.push_back(steps ? 1.0 : 0.0);
      some_idle = some_idle || !steps;
    }
    for (Parameter& parameter : reference.parameters) parameter.gradient = {};
    return some_idle;
  }
  Epoch epoch_;
};

/// A reducer of the trainer's own beside DDP.
class ReduceViews : public Command {
 public:
  explicit ReduceViews(int seed) : seed_(static_cast<std::uint64_t>(seed)) {}
  bool possible(const Case& /*now*/) const override { return true; }
  void run(Case& now) const override {
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { return rank.reduce_views(seed_); });
    must_not_throw(outcome);
    Values expected(10, 0.0);
    for (int rank = 0; rank < now.setup.ranks; ++rank) {
      const Values own = Rank::view_values(seed_, rank);
      for (std::size_t i = 0; i < own.size(); ++i) expected[i] += own[i] / now.setup.ranks;
    }
    compare("averages of views", outcome.numbers, expected, 0.0);
    now.check();
  }
  void show(std::ostream& out) const override { out << "a reducer on views, seed " << seed_; }

 private:
  std::uint64_t seed_;
};

/// Parts of the group, beside it and each other.
class SplitGroup : public Command {
 public:
  SplitGroup(int colors, bool reversed) : colors_(colors), reversed_(reversed) {}
  bool possible(const Case& now) const override { return now.setup.ranks > 1; }
  void run(Case& now) const override {
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { return rank.split(colors_, reversed_); });
    must_not_throw(outcome);
    if (outcome.numbers[0] != 1.0) throw Mismatch("a part of the group gathered other values");
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "split into " << colors_ << (reversed_ ? ", reversed" : "");
  }

 private:
  int colors_;
  bool reversed_;
};

// ---- Between backward and step

class Clear : public Command {
 public:
  explicit Clear(int optimizer) : optimizer_(optimizer) {}
  bool possible(const Case& now) const override {
    return optimizer_ < static_cast<int>(now.setup.rules.size());
  }
  void run(Case& now) const override {
    Reference& reference = now.reference;
    if (optimizer_ < 0) return clear_module(now);
    must_not_throw(now.system.each([&](Rank& rank) { rank.clear(optimizer_); }));
    reference.clear(bit(optimizer_));
    if (!now.any_gradient()) now.backwards = 0;
    now.lose_some();
    now.check();
  }
  void show(std::ostream& out) const override {
    if (optimizer_ < 0) {
      out << "module.clear_grad()";
    } else {
      out << "optimizer " << optimizer_ << ".clear_grad()";
    }
  }

 private:
  int optimizer_;
};

/// A backward that one rank alone loses: the other hears of it in that backward where it reduces,
/// and the group breaks; else in the step, which both refuse until their gradients are cleared.
class OneRankThrows : public Command {
 public:
  OneRankThrows(Loss loss, int thrower, int rank, bool synchronise, Step step)
      : loss_(loss), synchronise_(synchronise), step_(step) {
    loss_.overflow_rank = -1;
    loss_.odd_reach = 0;
    loss_.twice = false;
    if (loss_.form == Form::norm) loss_.form = Form::linear;
    loss_.thrower = thrower;
    loss_.throwing_rank = rank;
    step_.keep = false;
    loss_.in_forward = false;
    if (!step_.by_amp) step_.optimizer = std::max(step_.optimizer, 0);
  }
  bool possible(const Case& now) const override {
    Loss whole = loss_;
    whole.thrower = -1;
    const bool throws =
        loss_.reaches(loss_.thrower) && now.reference.parameters[at(loss_.thrower)].trainable;
    return now.setup.ranks == 2 && now.setup.ddp && loss_.by_ddp && !now.setup.wiring.two_ddps &&
           throws && !now.reference.may_refuse && Backward(whole, synchronise_, 1).possible(now) &&
           step_.optimizer < static_cast<int>(now.setup.rules.size()) &&
           (!step_.by_amp || now.setup.precision);
  }
  void run(Case& now) const override {
    const auto backward =
        now.system.apart([&](Rank& rank, int) { rank.backward(loss_, synchronise_, 0); });
    if (!backward[at(loss_.throwing_rank)].threw())
      throw Mismatch("expected the error to come out, got none");
    const bool other_threw = backward[at(1 - loss_.throwing_rank)].threw();
    now.over =
        synchronise_ || other_threw;  // it waited in a collective, or refused the loss as well
    if (other_threw) return;          // a GPU may go on alone until the step
    for (const System::Outcome& step :
         now.system.apart([&](Rank&rank, int) { rank.step(step_); })) {
      if (!step.threw())
        throw Mismatch("expected an error in the step of a lost gradient, got none");
    }
    if (now.over) return;
    const unsigned all = now.all_optimizers();
    if (loss_.by_amp)
      now.reference.add_pending(
          {.loss = loss_.id, .given = all, .optimizers = all, .doubtful = true});
    clear_module(now);
  }
  void show(std::ostream& out) const override {
    out << "rank " << loss_.throwing_rank << " alone: ";
    Backward(loss_, synchronise_, 1).show(out);
    out << ", ";
    TakeStep(step_).show(out);
  }

 private:
  Loss loss_;
  bool synchronise_;
  Step step_;
};

/// Both ranks have the same backwards of two losses, each in an order of its own: they hear of it by
/// the step at the latest, and of which losses they are.
class LossesInAnotherOrder : public Command {
 public:
  /// reducing: a bit for each of the three backwards.
  LossesInAnotherOrder(int reducing, bool from_the_first)
      : reducing_(static_cast<unsigned>(reducing)),
        ids_{{{0, 1, 0}, {from_the_first ? 1 : 0, 0, from_the_first ? 0 : 1}}} {}
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    return now.setup.ranks == 2 && now.setup.ddp && !now.setup.wiring.two_ddps &&
           !now.setup.wiring.sum && now.setup.precision && !now.any_gradient() &&
           reference.pending.empty() && !reference.may_refuse &&
           Backward({.size = 0.5}, true, 1).possible(now);
  }
  void run(Case& now) const override {
    const auto outcomes = now.system.apart([&](Rank& rank, int index) {
      for (std::size_t k = 0; k < 3; ++k)
        rank.backward({.id = ids_[at(index)][k], .size = 0.5}, (reducing_ >> k & 1U) != 0, 0);
      rank.step({});
    });
    for (const System::Outcome& outcome : outcomes) {
      for (const char* loss : {"loss 0 scaled", "loss 1 scaled"}) {
        if (outcome.error.find(loss) == std::string::npos)
          throw Mismatch("expected an error that names both losses, got: " + outcome.error);
      }
    }
    now.over = true;
  }
  void show(std::ostream& out) const override {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      out << (rank == 0 ? "rank 0" : "; rank 1") << " alone:";
      for (std::size_t k = 0; k < 3; ++k)
        out << " loss " << ids_[rank][k] << ((reducing_ >> k & 1U) != 0 ? "" : " (no_sync)");
    }
    out << ", step";
  }

 private:
  unsigned reducing_;
  std::array<std::array<int, 3>, 2> ids_;
};

class Freeze : public Command {
 public:
  Freeze(int parameter, bool freeze) : parameter_(parameter), freeze_(freeze) {}
  bool possible(const Case& now) const override {
    const Parameter& p = now.reference.parameters[at(parameter_)];
    if (p.trainable != freeze_) return false;
    return !p.gradient.exists() || (p.gradient.finite() && freeze_);
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.set_trainable(parameter_, !freeze_); }));
    now.reference.parameters[at(parameter_)].trainable = !freeze_;
    if (freeze_) {
      now.reference.doubt_losses_of(now.reference.parameters[at(parameter_)]);
      now.lose_some();
    }
    now.check();
  }
  void show(std::ostream& out) const override {
    out << (freeze_ ? "freeze(" : "unfreeze(") << kNames[at(parameter_)] << ")";
  }

 private:
  int parameter_;
  bool freeze_;
};

class WriteWeight : public Command {
 public:
  WriteWeight(int parameter, Write how) : parameter_(parameter), how_(how) {}
  /// A module of libtorch's is not written while gradients wait for their step.
  bool possible(const Case& now) const override {
    return has_cairns_modules() || !now.any_gradient();
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.write(parameter_, how_); }));
    for (double& w : now.reference.parameters[at(parameter_)].weight) {
      if (how_ == Write::initialise) w = 0.5;
      if (how_ == Write::clamp) w = std::max(w, 1.0);
      if (how_ == Write::average) w = 0.5 * w + 1.0;
    }
    now.check({now.half() ? bit(parameter_) : 0});
  }
  void show(std::ostream& out) const override {
    out << (how_ == Write::initialise ? "initialise("
            : how_ == Write::clamp    ? "clamp("
                                      : "average(")
        << kNames[at(parameter_)] << ")";
  }

 private:
  int parameter_;
  Write how_;
};

class AddGroup : public Command {
 public:
  AddGroup(int optimizer) : optimizer_(optimizer) {}
  bool possible(const Case& now) const override {
    return orphan(now) >= 0 && optimizer_ < static_cast<int>(now.setup.rules.size());
  }
  void run(Case& now) const override {
    const int p = orphan(now);
    must_not_throw(now.system.each([&](Rank& rank) { rank.add_group(p, optimizer_); }));
    Parameter& parameter = now.reference.parameters[at(p)];
    parameter.optimizer = optimizer_;
    parameter.driven = false;
    parameter.group = -1;
    parameter.gradient = {};
    now.added.emplace_back(p, optimizer_);
    now.check();
  }
  void show(std::ostream& out) const override { out << "optimizer " << optimizer_ << ".add_group"; }

 private:
  static int orphan(const Case& now) {
    for (int p = 0; p < kParameters; ++p) {
      if (now.reference.parameters[at(p)].optimizer < 0) return p;
    }
    return -1;
  }
  int optimizer_;
};

class GiveToAnother : public Command {
 public:
  explicit GiveToAnother(int parameter) : parameter_(parameter) {}
  bool possible(const Case& now) const override {
    const Parameter& p = now.reference.parameters[at(parameter_)];
    return !now.setup.precision && !now.half() && !now.any_gradient() && p.optimizer >= 0 &&
           p.trainable && !now.reference.may_refuse && now.setup.wiring.static_odd_reach == 0;
  }
  void run(Case& now) const override {
    const int optimizer = now.reference.parameters[at(parameter_)].optimizer;
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { return rank.give_to_another(parameter_, optimizer); });
    if (outcome.threw()) return now.check();
    Loss loss;
    for (int p = 0; p < kParameters; ++p) {
      Parameter& parameter = now.reference.parameters[at(p)];
      if (!parameter.trainable || parameter.optimizer != optimizer) continue;
      for (int rank = 0; rank < now.setup.ranks; ++rank) {
        Values own = loss.coefficients(p, rank);
        for (double& g : own) g *= now.share();
        parameter.gradient.of_rank.push_back(own);
      }
    }
    now.reference.update(optimizer, 0.0);
    for (Parameter& parameter : now.reference.parameters) parameter.gradient = {};
    now.check();
    if (outcome.numbers[0] != 0) {
      throw Mismatch("expected an error in the step of the second optimizer of one parameter");
    }
  }
  void show(std::ostream& out) const override {
    out << "give " << kNames[at(parameter_)] << " to another optimizer, backward, step both";
  }

 private:
  int parameter_;
};

}  // namespace

// ---- Generators

rc::Gen<Loss> losses() {
  return rc::gen::map(
      rc::gen::tuple(
          one_of(kLosses), choice<unsigned>({{4, 3}, {1, 1}, {1, 2}}),
          choice<double>({{3, 0.5}, {1, 0x1p-6}, {1, 0x1p-9}}), mostly(), mostly(),
          rc::gen::tuple(mostly(), seldom(), choice<int>({{20, -1}, {1, 0}, {1, 1}, {1, 2}}),
                         choice<int>({{12, -1}, {1, 0}, {1, 1}, {1, 2}, {1, 3}}), seldom()),
          choice<Form>({{4, Form::linear}, {3, Form::product}, {1, Form::tanh}, {2, Form::norm}}),
          rc::gen::pair(seldom(), seldom())),
      [](const auto& drawn) {
        const auto& [id, reach, size, by_amp, by_ddp, more, form, how] = drawn;
        const auto& [to_all, delayed, overflow_rank, thrower, in_forward] = more;
        Loss loss{id,     reach,   size,          by_amp,  by_ddp,
                  to_all, delayed, overflow_rank, thrower, in_forward};
        loss.form = form;  // exact in f16 with any weight that is not tiny
        loss.apart = how.first && by_amp;
        loss.twice = how.second && !loss.apart && thrower < 0;
        if (form != Form::linear) loss.size = std::max(size, 0x1p-3);
        return loss;
      });
}

namespace {

/// Odd ranks reach another part of the model than the others.
rc::Gen<Loss> losses_of_ranks() {
  return rc::gen::map(rc::gen::pair(losses(), choice<unsigned>({{1, 3}, {1, 1}, {1, 2}})),
                      [](const auto& drawn) {
                        Loss loss = drawn.first;
                        loss.odd_reach = drawn.second;
                        return loss;
                      });
}

rc::Gen<Epoch> epochs() {
  using By = parallel::DivideBy;
  const auto batches = [] { return choice<int>({{1, 0}, {1, 1}, {1, 2}, {1, 3}}); };
  return rc::gen::map(
      rc::gen::tuple(losses(), rc::gen::tuple(batches(), batches(), batches(), batches()),
                     choice<By>({{1, By::participants}, {1, By::world}, {1, By::samples}}),
                     mostly(), seldom(), seldom(),
                     rc::gen::tuple(one_of(kParameters), one_of(3), seldom())),
      [](const auto& drawn) {
        const auto& [loss, each, divide_by, by_amp, cleared, freezes, frozen] = drawn;
        Epoch epoch{.divide_by = divide_by, .by_amp = by_amp};
        epoch.loss.id = loss.id;
        epoch.loss.size = loss.size;
        epoch.loss.by_amp = by_amp;
        epoch.batches = {std::get<0>(each), std::get<1>(each), std::get<2>(each),
                         std::get<3>(each)};
        // What the scales hear of it is seen after the epoch, so it is the last one.
        if (cleared)
          epoch.cleared = *std::max_element(epoch.batches.begin(), epoch.batches.end()) - 1;
        if (freezes) std::tie(epoch.frozen, epoch.freezes_at, epoch.thaws) = frozen;
        return epoch;
      });
}

rc::Gen<Step> steps() {
  return rc::gen::map(rc::gen::tuple(mostly(), choice<int>({{2, -1}, {1, 0}, {1, 1}}),
                                     choice<double>({{3, 0.0}, {1, 0.25}, {1, 2.0}}), seldom(),
                                     rc::gen::arbitrary<bool>(), seldom()),
                      [](const auto& drawn) {
                        const auto& [by_amp, optimizer, max_norm, schedule, per_group, keep] =
                            drawn;
                        return Step{.by_amp = by_amp,
                                    .optimizer = optimizer,
                                    .max_norm = max_norm,
                                    .schedule = schedule,
                                    .keep = keep,
                                    .per_group = per_group && max_norm > 0};
                      });
}

}  // namespace

rc::Gen<CommandPtr> training_commands() {
  using rc::gen::just;
  return rc::gen::weightedOneOf<CommandPtr>({
      {10, make<Backward>(losses(), mostly(), just(1))},
      {2, make<Backward>(losses(), mostly(), choice<int>({{1, 2}, {1, 3}}))},
      {2, make<Backward>(losses_of_ranks(), mostly(), choice<int>({{2, 1}, {1, 2}}))},
      {10, make<TakeStep>(steps())},
      {2, make<UnevenEpoch>(epochs())},
      {1, make<ReduceViews>(one_of(8))},
      {1, make<SplitGroup>(choice<int>({{1, 1}, {2, 2}, {1, 4}}), rc::gen::arbitrary<bool>())},
      {2, make<AccumulationWindow>(losses(), choice<int>({{1, 1}, {1, 2}, {1, 4}}), steps())},
      {1, make<AccumulationWindow>(losses_of_ranks(), choice<int>({{1, 1}, {1, 2}}), steps())},
      {2, make<OneRankThrows>(losses(), one_of(kParameters), one_of(2), seldom(), steps())},
      {1, make<LossesInAnotherOrder>(one_of(8), rc::gen::arbitrary<bool>())},
      {2, make<Clear>(choice<int>({{1, 0}, {1, 1}, {2, -1}}))},
      {1, make<Freeze>(one_of(kParameters), just(true))},
      {2, make<Freeze>(one_of(kParameters), just(false))},
      {1, make<WriteWeight>(
              one_of(kParameters),
              choice<Write>({{1, Write::initialise}, {1, Write::clamp}, {1, Write::average}}))},
      {1, make<AddGroup>(one_of(2))},
      {1, make<GiveToAnother>(one_of(kParameters))},
  });
}

}  // namespace cairn::stateful
