#include "commands.h"

#include <cmath>
#include <initializer_list>
#include <ostream>
#include <string>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/half.h"

namespace cairn::stateful {

namespace {

constexpr unsigned kAll = (1U << kParameters) - 1;
constexpr int kMostBackwards = 12;  // before a step: half gradients stay far from their largest

unsigned bit(int index) {
  return 1U << index;
}

std::size_t at(int index) {
  return static_cast<std::size_t>(index);
}

/// One rounding to that dtype, relative.
double rounding(DType dtype) {
  if (dtype == DType::f16) return 0x1p-11;
  return dtype == DType::bf16 ? 0x1p-8 : 0.0;
}

/// What f32 arithmetic may differ by from that in doubles, over a sequence.
constexpr double kExact = 1e-5;

void compare(const std::string& what, const Values& seen, const Values& expected,
             double tolerance) {
  if (seen.size() != expected.size()) {
    throw Mismatch(core::str(what, ": expected ", expected.size(), " values, got ", seen.size()));
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (std::abs(seen[i] - expected[i]) <= tolerance * (1 + std::abs(expected[i]))) continue;
    throw Mismatch(core::str(what, "[", i, "]: expected ", expected[i], ", got ", seen[i],
                             " (tolerance ", tolerance * (1 + std::abs(expected[i])), ")"));
  }
}

}  // namespace

// ---- Case

namespace {
/// O2 and O3 tell the optimizers; other levels leave them as they are.
bool keeps_masters(const std::optional<Precision>& precision, bool before) {
  if (!precision) return before;
  if (precision->level == amp::OptLevel::O2) return true;
  return precision->level != amp::OptLevel::O3 && before;
}
}  // namespace

Case::Case(const Setup& s) : setup(s), system(s) {
  reference.rules = s.rules;
  reference.positions.assign(s.rules.size(), 0);
  reference.skips.assign(s.rules.size(), Answer::no);
  const Scale scale = s.precision ? s.precision->scale_of_loss() : Scale();
  reference.scales.assign(kLosses, scale);
  for (int p = 0; p < kParameters; ++p) {
    Parameter parameter;
    parameter.weight = initial_weight(p, false);
    parameter.optimizer = s.optimizer_of[at(p)];
    parameter.trainable = (s.frozen & bit(p)) == 0;
    reference.parameters.push_back(parameter);
  }
  build(false);
  masters = keeps_masters(s.precision, true);
  if (!over) check(rounded_by_cast());
}

/// Data parallelism wants one arena: it may ask to be built before optimizers that share it out.
void Case::build(bool fresh) {
  const System::Outcome built = system.rebuild(setup, fresh);
  const bool shared_out =
      setup.rules.size() > 1 || std::any_of(setup.optimizer_of.begin(), setup.optimizer_of.end(),
                                            [](int o) { return o < 0; });
  over = built.threw() && setup.ddp && setup.order != Order::ddp_optimizer_amp && shared_out;
  if (built.threw() && !over) throw Mismatch("building threw: " + built.error);
}

bool Case::half() const {
  if (!setup.precision) return core::is_half(dtype);
  return setup.precision->level == amp::OptLevel::O2 || setup.precision->level == amp::OptLevel::O3;
}

bool Case::coarse() const {
  return half() && !(setup.precision && setup.precision->level == amp::OptLevel::O2);
}

unsigned Case::rounded_by_cast() const {
  if (half() && coarse()) return kAll;
  return rounded_by_load();
}

unsigned Case::rounded_by_load() const {
  if (!half()) return 0;
  if (!masters) return kAll;
  unsigned frozen = 0;
  for (int p = 0; p < kParameters; ++p) {
    const Parameter& parameter = reference.parameters[at(p)];
    if (!parameter.trainable || parameter.optimizer < 0) frozen |= bit(p);
  }
  return frozen;
}

bool Case::any_gradient() const {
  return std::any_of(reference.parameters.begin(), reference.parameters.end(),
                     [](const Parameter& p) { return p.gradient.exists(); });
}

void Case::check(unsigned rounds, DType through) {
  const Rank::Seen seen = system.look();
  for (int p = 0; p < kParameters; ++p) {
    const Rank::Seen::Parameter& own = seen.parameters[at(p)];
    Parameter& expected = reference.parameters[at(p)];
    const std::string name = kNames[at(p)];
    const bool follows = (rounds & bit(p)) != 0;
    const double rounded = follows ? std::max(rounding(own.dtype), rounding(through)) : 0.0;
    const double tolerance = 16 * rounded + kExact;
    compare(name, own.weight, expected.weight, tolerance);
    compare(name + " as forward sees it", own.raw, own.weight, 1.001 * rounding(own.dtype));
    if (expected.optimizer >= 0 && own.updates != expected.updates) {
      throw Mismatch(
          core::str(name, ": expected ", expected.updates, " updates, got ", own.updates));
    }
    std::vector<Values*> moments;
    const Rule& rule = reference.rules[at(std::max(expected.optimizer, 0))];
    if (rule.adam || rule.momentum > 0) moments.push_back(&expected.first);
    if (rule.adam) moments.push_back(&expected.second);
    if (own.updates == 0) moments.clear();
    if (own.moments.size() != moments.size()) {
      throw Mismatch(
          core::str(name, ": expected ", moments.size(), " moments, got ", own.moments.size()));
    }
    for (std::size_t m = 0; m < moments.size(); ++m) {
      compare(core::str("moment ", m, " of ", name), own.moments[m], *moments[m], tolerance);
      if (follows) *moments[m] = own.moments[m];
    }
    if (follows) expected.weight = own.weight;
  }
  for (const std::string& name : seen.named) {
    if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) continue;
    throw Mismatch("expected a parameter's full name, got '" + name + "'");
  }
  for (std::size_t o = 0; o < seen.lrs.size(); ++o) {
    compare(core::str("learning rate of optimizer ", o), {seen.lrs[o]},
            {reference.lr(static_cast<int>(o), true)}, 1e-12);
  }
  for (std::size_t id = 0; id < seen.loss_scales.size(); ++id) {
    reference.scales[id].follow(seen.loss_scales[id]);
    compare(core::str("scale of loss ", id), {seen.loss_scales[id]}, {reference.scales[id].value},
            0.0);
  }
}

namespace {

void must_not_throw(const System::Outcome& outcome) {
  if (outcome.threw()) throw Mismatch("expected no error, got: " + outcome.error);
}

// ---- Backward

class Backward : public Command {
 public:
  Backward(Loss loss, bool synchronise, int micro_batches)
      : loss_(loss), synchronise_(synchronise), micro_batches_(micro_batches) {}

  bool possible(const Case& now) const override {
    const auto& parameters = now.reference.parameters;
    bool any = false;
    bool all = true;
    for (int p = 0; p < kParameters; ++p) {
      const Parameter& parameter = parameters[at(p)];
      any = any || (loss_.reaches(p) && parameter.trainable);
      all = all && (!parameter.trainable || loss_.reaches(p));
    }
    const bool overflows = loss_.overflow_rank >= 0;
    const bool throws = loss_.thrower >= 0;
    if (!any || (overflows && throws)) return false;
    if (overflows && !parameters[at(loss_.first())].trainable) return false;
    if (loss_.overflow_rank == 1 && now.setup.ranks == 1) return false;
    if (throws && !loss_.reaches(loss_.thrower)) return false;
    if (throws && !loss_.in_forward && !parameters[at(loss_.thrower)].trainable) return false;
    if (reduces(now) && !now.setup.unused_as_zeros && !all) return false;
    if (loss_.by_amp != now.setup.precision.has_value() && loss_.by_amp) return false;
    return now.backwards + micro_batches_ <= kMostBackwards;
  }

  void run(Case& now) const override {
    for (int k = 0; k < micro_batches_; ++k) {
      const bool last = k + 1 == micro_batches_;
      if (!backward(now, synchronise_ && last)) return now.check();
    }
    now.check();
  }

  void show(std::ostream& out) const override {
    out << (micro_batches_ > 1 ? "accumulate" : "backward") << "(loss " << loss_.id << " of "
        << (loss_.reach == 3   ? "a and b"
            : loss_.reach == 1 ? "a"
                               : "b")
        << ", size " << loss_.size << (loss_.by_amp ? ", by amp" : ", plain");
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
    out << ")";
  }

 private:
  bool reduces(const Case& now) const {
    return now.setup.ranks > 1 && now.setup.ddp && synchronise_;
  }

  unsigned optimizers(const Case& now, bool fills) const {
    if (loss_.to_all || fills) return 0;
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
    const bool reduces_now = synchronise && reduces(now);
    const bool fills = reduces_now && now.setup.unused_as_zeros;
    const unsigned declared = optimizers(now, fills);
    Pending pending{loss_.id, declared == 0 ? now.all_optimizers() : declared,
                    loss_.overflow_rank >= 0, loss_.delayed, false};
    const bool scaled = loss_.by_amp && reference.scales[at(loss_.id)].value != 1.0;
    bool mixes = false;
    for (const Parameter& p : reference.parameters) {
      const bool by_amp = p.gradient.exists() && !p.gradient.plain && now.setup.precision;
      mixes = mixes || (loss_.by_amp ? p.gradient.plain : p.gradient.scaled || by_amp);
    }
    ++now.backwards;
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { rank.backward(loss_, synchronise, declared); });
    const bool broken = loss_.thrower >= 0;
    if (broken && !outcome.threw()) throw Mismatch("expected the error to come out, got none");
    if (outcome.threw()) {
      const bool may = broken || mixes || reference.may_refuse;
      if (!may) throw Mismatch("expected no error, got: " + outcome.error);
      if (broken && loss_.in_forward) return false;
      // What was there before cannot be told from what was added; what was empty is empty again.
      for (const Parameter& p : reference.parameters) {
        reference.may_refuse = reference.may_refuse || (p.trainable && p.gradient.exists());
      }
      pending.doubtful = true;
      pending.overflow = false;
      if (loss_.by_amp) reference.pending.push_back(pending);
      return false;
    }
    for (int p = 0; p < kParameters; ++p) {
      Parameter& parameter = reference.parameters[at(p)];
      if (!parameter.trainable) continue;
      if (loss_.reaches(p)) add(parameter, p, now.setup.ranks, scaled);
      if (fills && !parameter.gradient.exists()) add_zeros(parameter, now.setup.ranks);
      if (reduces_now) {
        parameter.gradient.local = false;
      } else if (loss_.reaches(p) && now.setup.ranks > 1 && now.setup.ddp) {
        parameter.gradient.local = true;
      }
    }
    if (loss_.by_amp) reference.pending.push_back(pending);
    return true;
  }

  void add(Parameter& parameter, int p, int ranks, bool scaled) const {
    Gradient& gradient = parameter.gradient;
    gradient.plain = gradient.plain || !loss_.by_amp;
    gradient.scaled = gradient.scaled || scaled;
    gradient.filled = false;
    gradient.of_rank.resize(at(ranks), Values(parameter.weight.size(), 0.0));
    for (int rank = 0; rank < ranks; ++rank) {
      const Values c = loss_.coefficients(p, rank);
      for (std::size_t i = 0; i < c.size(); ++i) gradient.of_rank[at(rank)][i] += c[i];
    }
  }

  void add_zeros(Parameter& parameter, int ranks) const {
    parameter.gradient.of_rank.assign(at(ranks), Values(parameter.weight.size(), 0.0));
    parameter.gradient.filled = true;
    parameter.gradient.plain = !loss_.by_amp;
  }

  Loss loss_;
  bool synchronise_;
  int micro_batches_;
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
    const double norm = step_.optimizer < 0 ? 0.0 : reference.norm(which);
    const System::Outcome outcome = now.system.each([&](Rank& rank) { return rank.step(step_); });
    if (outcome.threw()) {
      if (!expected.may_throw && !expected.must_throw) {
        throw Mismatch("expected no error, got: " + outcome.error);
      }
      return now.check();
    }
    if (expected.must_throw) throw Mismatch("expected an error: " + expected.why);
    const bool applied = outcome.numbers[0] != 0;
    take(now, which, applied, expected);
    if (empty && applied) throw Mismatch("a step without any gradient was applied");
    if (applied && step_.optimizer >= 0 && !now.coarse()) {
      compare("norm of the gradients", {outcome.numbers[1]}, {norm}, kExact);
    }
    for (std::size_t o = 0; o < reference.positions.size(); ++o) {
      if (step_.schedule && applied && (which & bit(static_cast<int>(o))) != 0) {
        ++reference.positions[o];
      }
    }
    now.check(now.coarse() ? kAll : 0);
  }

  void show(std::ostream& out) const override {
    out << (step_.by_amp ? "precision.step(" : "optimizer.step(");
    if (step_.optimizer >= 0) out << "optimizer " << step_.optimizer;
    if (step_.max_norm > 0) out << (step_.optimizer >= 0 ? ", " : "") << "clip " << step_.max_norm;
    out << ")" << (step_.schedule ? " and schedule" : "");
  }

 private:
  struct Expectation {
    bool may_throw = false, must_throw = false;
    bool scales_known = true;
    std::string why;
  };

  Expectation expectation(Case& now, unsigned which) const {
    Expectation expected;
    bool plain = false, scaled = false, local = false, filled = false, by_amp = false;
    now.reference.each_of(which, [&](const Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      plain = plain || p.gradient.plain;
      scaled = scaled || p.gradient.scaled;
      local = local || p.gradient.local;
      filled = filled || p.gradient.filled;
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
    expected.may_throw = expected.may_throw || local || now.reference.may_refuse || empty ||
                         foreign || (filled && now.setup.precision);
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
      if (skips[at(o)] == Answer::no) reference.update(o, step_.max_norm);
    }
    if (step_.by_amp) {
      reference.each_of(which, [](Parameter& p) { p.gradient = {}; });
    } else {
      reference.clear(which);  // amp has not heard of it
    }
    if (!now.any_gradient()) now.backwards = 0;
    if (!known) {
      reference.scales = before;
      for (Scale& scale : reference.scales) scale.known = false;
    }
    if (!some_empty && applied != all) {
      throw Mismatch(all ? "expected the step to be applied, got a skip"
                         : "expected a skip, got a step that was applied");
    }
  }

  Step step_;
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
    must_not_throw(now.system.each([&](Rank& rank) {
      if (optimizer_ < 0) return rank.clear_module();
      rank.clear(optimizer_);
    }));
    reference.clear(optimizer_ < 0 ? now.all_optimizers() : bit(optimizer_));
    if (optimizer_ < 0) {
      for (Parameter& p : reference.parameters) p.gradient = {};
      reference.may_refuse = false;
    }
    if (!now.any_gradient()) now.backwards = 0;
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
  bool possible(const Case& /*now*/) const override { return true; }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.write(parameter_, how_); }));
    for (double& w : now.reference.parameters[at(parameter_)].weight) {
      if (how_ == Write::initialise) w = 0.5;
      if (how_ == Write::clamp) w = std::max(w, 1.0);
      if (how_ == Write::average) w = 0.5 * w + 1.0;
    }
    now.check(now.half() ? bit(parameter_) : 0);
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
           p.trainable && !now.reference.may_refuse;
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
        parameter.gradient.of_rank.push_back(loss.coefficients(p, rank));
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

// ---- Precision

class To : public Command {
 public:
  explicit To(DType dtype) : dtype_(dtype) {}
  bool possible(const Case& now) const override {
    return !now.setup.precision && now.dtype != dtype_;
  }
  void run(Case& now) const override {
    const DType before = now.dtype;
    must_not_throw(now.system.each([&](Rank& rank) { rank.to(dtype_); }));
    for (Parameter& p : now.reference.parameters) p.gradient = {};
    now.dtype = dtype_;
    now.backwards = 0;
    now.check(kAll, before);
  }
  void show(std::ostream& out) const override { out << "model.to(" << dtype_ << ")"; }

 private:
  DType dtype_;
};

std::ostream& operator<<(std::ostream& out, const Precision& precision) {
  out << amp::name(precision.level);
  if (precision.level != amp::OptLevel::O0) out << " " << precision.half;
  out << (precision.dynamic ? ", dynamic scale from " : ", scale ") << precision.scale;
  return out << (precision.fallback ? ", fallback_after" : "");
}

class Initialize : public Command {
 public:
  explicit Initialize(Precision precision) : precision_(precision) {}
  bool possible(const Case& now) const override {
    return !now.setup.precision && !now.half() && !now.any_gradient();
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.initialize(precision_); }));
    now.setup.precision = precision_;
    now.masters = keeps_masters(precision_, now.masters);
    now.reference.scales.assign(kLosses, precision_.scale_of_loss());
    now.check(now.rounded_by_cast());
  }
  void show(std::ostream& out) const override { out << "amp::initialize(" << precision_ << ")"; }

 private:
  Precision precision_;
};

class Release : public Command {
 public:
  bool possible(const Case& now) const override { return now.setup.precision.has_value(); }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.release(); }));
    now.setup.precision.reset();
    now.reference.forget_pending();
    now.backwards = 0;
    now.check();
  }
  void show(std::ostream& out) const override { out << "precision.release()"; }
};

class Clone : public Command {
 public:
  bool possible(const Case& /*now*/) const override { return true; }
  void run(Case& now) const override {
    const System::Outcome outcome =
        now.system.each([](Rank& rank) { return rank.cloned_weights(); });
    must_not_throw(outcome);
    Values expected;
    for (const Parameter& p : now.reference.parameters) {
      expected.insert(expected.end(), p.weight.begin(), p.weight.end());
    }
    compare("weights of the clone", outcome.numbers, expected, kExact);
    now.check();
  }
  void show(std::ostream& out) const override { out << "model.clone()"; }
};

// ---- Files

class Save : public Command {
 public:
  explicit Save(bool amp_first) : amp_first_(amp_first) {}
  bool possible(const Case& /*now*/) const override { return true; }
  void run(Case& now) const override {
    const std::string folder = now.system.folder();
    must_not_throw(now.system.each([&](Rank& rank) { rank.save(folder, amp_first_); }));
    now.file = {now.reference, now.setup.precision.has_value(), now.added};
    for (Scale& scale : now.file->state.scales) scale.carried = false;
    for (Parameter& p : now.file->state.parameters) p.gradient = {};
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "save(" << (amp_first_ ? "amp, model, ..." : "model, ..., amp") << ")";
  }

 private:
  bool amp_first_;
};

class Resume : public Command {
 public:
  /// setup: makes fresh objects at that level, built in that order; else loads into those there.
  Resume(bool amp_first, std::optional<Setup> fresh)
      : amp_first_(amp_first), fresh_(std::move(fresh)) {}
  bool possible(const Case& now) const override {
    if (!now.file) return false;
    if (!fresh_) {
      return now.file->amp == now.setup.precision.has_value() && now.file->added == now.added;
    }
    return now.file->amp == fresh_->precision.has_value();
  }
  void run(Case& now) const override {
    if (fresh_) rebuild(now);
    if (now.over) return;
    const std::string path = now.system.folder() + "/step-00000001";
    must_not_throw(now.system.each([&](Rank& rank) { rank.resume(path, amp_first_); }));
    now.reference.load(now.file->state);
    now.backwards = 0;
    now.check(now.rounded_by_load());
  }
  void show(std::ostream& out) const override {
    const char* order = amp_first_ ? "amp, model, ..." : "model, ..., amp";
    if (!fresh_) {
      out << "resume here(" << order << ")";
      return;
    }
    out << "resume in fresh objects(" << order << ")";
    if (fresh_->precision) out << " at " << *fresh_->precision;
    if (fresh_->frozen != 0) out << ", frozen " << fresh_->frozen;
    out << order_name(fresh_->order);
  }
  static const char* order_name(Order order) {
    return order == Order::optimizer_ddp_amp   ? ", optimizers, ddp, amp"
           : order == Order::ddp_optimizer_amp ? ", ddp, optimizers, amp"
                                               : ", optimizers, amp, ddp";
  }

 private:
  void rebuild(Case& now) const {
    Setup& setup = now.setup;
    setup.precision = fresh_->precision;
    setup.frozen = fresh_->frozen;
    setup.order = fresh_->order;
    now.build(true);
    if (now.over) return;
    now.added = now.file->added;
    for (const auto& [parameter, optimizer] : now.added) {
      const int p = parameter, o = optimizer;
      must_not_throw(now.system.each([&](Rank& rank) { rank.add_group(p, o); }));
    }
    now.dtype = DType::f32;
    now.masters = keeps_masters(setup.precision, true);
    const Scale scale = setup.precision ? setup.precision->scale_of_loss() : Scale();
    now.reference.scales.assign(kLosses, scale);
    for (int p = 0; p < kParameters; ++p) {
      now.reference.parameters[at(p)].trainable = (setup.frozen & bit(p)) == 0;
    }
  }

  bool amp_first_;
  std::optional<Setup> fresh_;
};

// ---- Generators. Numbers shrink to 0, so the first of a list is the simplest.

template <class T>
rc::Gen<T> choice(std::initializer_list<std::pair<int, T>> weighted) {
  std::vector<T> table;
  for (const auto& [weight, value] : weighted) {
    for (int k = 0; k < weight; ++k) table.push_back(value);
  }
  const auto size = static_cast<int>(table.size());
  return rc::gen::map(rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, size)),
                      [table](int index) { return table[at(index)]; });
}

rc::Gen<bool> seldom() {
  return choice<bool>({{6, false}, {1, true}});
}

rc::Gen<bool> mostly() {
  return choice<bool>({{6, true}, {1, false}});
}

rc::Gen<int> one_of(int count) {
  return rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, count));
}

rc::Gen<Loss> losses() {
  return rc::gen::map(
      rc::gen::tuple(
          one_of(kLosses), choice<unsigned>({{4, 3}, {1, 1}, {1, 2}}),
          choice<double>({{3, 0.5}, {1, 0x1p-6}, {1, 0x1p-9}}), mostly(), mostly(),
          rc::gen::tuple(mostly(), seldom(), choice<int>({{20, -1}, {1, 0}, {1, 1}, {1, 2}}),
                         choice<int>({{12, -1}, {1, 0}, {1, 1}, {1, 2}, {1, 3}}), seldom())),
      [](const auto& drawn) {
        const auto& [id, reach, size, by_amp, by_ddp, more] = drawn;
        const auto& [to_all, delayed, overflow_rank, thrower, in_forward] = more;
        return Loss{id,     reach,   size,          by_amp,  by_ddp,
                    to_all, delayed, overflow_rank, thrower, in_forward};
      });
}

rc::Gen<Precision> precisions() {
  return rc::gen::map(
      rc::gen::tuple(choice<amp::OptLevel>({{2, amp::OptLevel::O0},
                                            {2, amp::OptLevel::O1},
                                            {4, amp::OptLevel::O2},
                                            {1, amp::OptLevel::O3}}),
                     choice<DType>({{1, DType::f16}, {1, DType::bf16}}), rc::gen::arbitrary<bool>(),
                     choice<double>({{1, 1.0}, {2, 16.0}}), seldom()),
      [](const auto& drawn) {
        const auto& [level, half, dynamic, scale, fallback] = drawn;
        return Precision{level, half, dynamic, scale, fallback};
      });
}

rc::Gen<std::optional<Precision>> maybe_precision() {
  return rc::gen::map(rc::gen::pair(mostly(), precisions()), [](const auto& drawn) {
    return drawn.first ? std::optional<Precision>(drawn.second) : std::nullopt;
  });
}

rc::Gen<Order> orders() {
  return choice<Order>({{2, Order::ddp_optimizer_amp},
                        {1, Order::optimizer_ddp_amp},
                        {1, Order::optimizer_amp_ddp}});
}

rc::Gen<unsigned> frozen_masks() {
  return choice<unsigned>({{5, 0}, {1, 1}, {1, 4}, {1, 3}, {1, 12}});
}

template <class C, class... Arguments>
rc::Gen<CommandPtr> make(rc::Gen<Arguments>... arguments) {
  return rc::gen::map(rc::gen::tuple(std::move(arguments)...), [](const auto& drawn) {
    return std::apply(
        [](const auto&... values) -> CommandPtr { return std::make_shared<const C>(values...); },
        drawn);
  });
}

rc::Gen<Step> steps() {
  return rc::gen::map(rc::gen::tuple(mostly(), choice<int>({{2, -1}, {1, 0}, {1, 1}}),
                                     choice<double>({{3, 0.0}, {1, 0.25}}), seldom()),
                      [](const auto& drawn) {
                        const auto& [by_amp, optimizer, max_norm, schedule] = drawn;
                        return Step{by_amp, optimizer, max_norm, schedule};
                      });
}

rc::Gen<std::optional<Setup>> fresh_setups() {
  return rc::gen::map(rc::gen::tuple(maybe_precision(), orders(), frozen_masks()),
                      [](const auto& drawn) {
                        Setup setup;
                        std::tie(setup.precision, setup.order, setup.frozen) = drawn;
                        return std::optional<Setup>(setup);
                      });
}

}  // namespace

rc::Gen<CommandPtr> commands() {
  using rc::gen::just;
  return rc::gen::weightedOneOf<CommandPtr>({
      {10, make<Backward>(losses(), mostly(), just(1))},
      {2, make<Backward>(losses(), mostly(), choice<int>({{1, 2}, {1, 3}}))},
      {10, make<TakeStep>(steps())},
      {2, make<Clear>(choice<int>({{1, 0}, {1, 1}, {2, -1}}))},
      {1, make<Freeze>(one_of(kParameters), just(true))},
      {2, make<Freeze>(one_of(kParameters), just(false))},
      {1, make<WriteWeight>(
              one_of(kParameters),
              choice<Write>({{1, Write::initialise}, {1, Write::clamp}, {1, Write::average}}))},
      {1, make<AddGroup>(one_of(2))},
      {1, make<GiveToAnother>(one_of(kParameters))},
      {1, make<To>(choice<DType>({{1, DType::f32}, {1, DType::bf16}, {1, DType::f16}}))},
      {1, make<Initialize>(precisions())},
      {1, make<Release>()},
      {1, make<Clone>()},
      {2, make<Save>(rc::gen::arbitrary<bool>())},
      {1, make<Resume>(rc::gen::arbitrary<bool>(), just(std::optional<Setup>()))},
      {1, make<Resume>(rc::gen::arbitrary<bool>(), fresh_setups())},
  });
}

rc::Gen<Setup> setups(int ranks) {
  const auto rules =
      choice<Rule>({{2, Rule{}}, {1, Rule{false, 0.5, 0.125}}, {1, Rule{true, 0.0, 0.125}}});
  const auto layouts = choice<std::vector<int>>({{3, {0, 0, 0, 0}},
                                                 {2, {0, 0, 1, 1}},
                                                 {1, {0, 1, 0, 1}},
                                                 {1, {0, 0, 0, -1}},
                                                 {1, {0, -1, 1, 1}}});
  return rc::gen::map(
      rc::gen::tuple(orders(), rc::gen::arbitrary<bool>(), rc::gen::arbitrary<bool>(), layouts,
                     rc::gen::pair(rules, rules), rc::gen::pair(frozen_masks(), maybe_precision())),
      [ranks](const auto& drawn) {
        Setup setup;
        setup.ranks = ranks;
        std::pair<Rule, Rule> rules_of;
        std::pair<unsigned, std::optional<Precision>> rest;
        std::tie(setup.order, setup.ddp, setup.unused_as_zeros, setup.optimizer_of, rules_of,
                 rest) = drawn;
        setup.ddp = setup.ddp || ranks > 1;
        setup.rules = {rules_of.first};
        const auto& owners = setup.optimizer_of;
        if (std::find(owners.begin(), owners.end(), 1) != owners.end()) {
          setup.rules.push_back(rules_of.second);
        }
        setup.frozen = rest.first;
        setup.precision = rest.second;
        return setup;
      });
}

std::ostream& operator<<(std::ostream& out, const Setup& setup) {
  out << setup.ranks << (setup.ranks == 1 ? " rank" : " ranks");
  for (std::size_t o = 0; o < setup.rules.size(); ++o) {
    const Rule& rule = setup.rules[o];
    out << ", optimizer " << o << " (" << (rule.adam ? "Adam" : "SGD");
    if (rule.momentum > 0) out << " with momentum";
    out << ") of";
    for (int p = 0; p < kParameters; ++p) {
      if (setup.optimizer_of[at(p)] == static_cast<int>(o)) out << " " << kNames[at(p)];
    }
  }
  out << "; " << (setup.ddp ? "ddp" : "no ddp")
      << (setup.unused_as_zeros ? " with unused_as_zeros" : "") << Resume::order_name(setup.order);
  if (setup.frozen != 0) out << "; frozen:";
  for (int p = 0; p < kParameters; ++p) {
    if ((setup.frozen & bit(p)) != 0) out << " " << kNames[at(p)];
  }
  if (setup.precision) out << "; amp::initialize(" << *setup.precision << ")";
  return out;
}

}  // namespace cairn::stateful
