// A loss's backward, or several, on every rank.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "cairn/core/error.h"
#include "commands.h"

namespace cairn::stateful {

constexpr int kMostBackwards = 12;  // before a step: half gradients stay far from their largest

/// Of every parameter, an optimizer's or not.
inline void drop_gradients(Case& now) {
  must_not_throw(now.system.each([](Rank& rank) { rank.clear_module(); }));
  now.reference.clear(now.all_optimizers());
  for (Parameter& p : now.reference.parameters) p.gradient = {};
  now.reference.may_refuse = false;
  now.reference.ranks_differ = false;
  now.backwards = 0;
}

inline void clear_module(Case& now) {
  drop_gradients(now);
  now.check();
}

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
      const bool added = outcome.met_refusal() && now.any_gradient();
      const bool may = broken || mixes || reference.may_refuse || outcome.gave_up() || added;
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

}  // namespace cairn::stateful
