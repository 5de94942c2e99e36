#include <algorithm>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "backward_command.h"
#include "cairn/core/error.h"
#include "generators.h"
#include "refusal_command.h"
#include "step_command.h"

namespace cairn::stateful {

namespace {

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

/// One forward and one backward: a batch norm's statistics count the forward that was refused.
rc::Gen<Loss> losses_of_one_run() {
  return rc::gen::map(losses(), [](Loss loss) {
    if (loss.form == Form::norm) loss.form = Form::product;
    loss.twice = false;
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
      {3, refused(make<Backward>(losses_of_one_run(), mostly(), just(1)))},
      {3, refused(make<TakeStep>(steps()))},
  });
}

}  // namespace cairn::stateful
