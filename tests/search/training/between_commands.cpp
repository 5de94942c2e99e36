#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "backward_command.h"
#include "cairn/core/error.h"
#include "generators.h"
#include "step_command.h"

namespace cairn::stateful {

namespace {

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

/// Both ranks have the same backwards of two losses, each in an order of its own: they hear of it
/// by the step at the latest, and of which losses they are.
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

rc::Gen<CommandPtr> between_commands() {
  using rc::gen::just;
  return rc::gen::weightedOneOf<CommandPtr>({
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
