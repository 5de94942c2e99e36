#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>

#include "commands.h"
#include "generators.h"

namespace cairn::stateful {

namespace {

/// Every rank holds the gradients that a step would use, finite ones.
bool gradients_are_plain(const Case& now) {
  if (!has_cairns_modules() || now.reference.unreduced || now.reference.may_refuse) return false;
  const auto& all = now.reference.parameters;
  return now.any_gradient() && std::all_of(all.begin(), all.end(),
                                           [](const Parameter& p) { return p.gradient.finite(); });
}

class EditGradients : public Command {
 public:
  explicit EditGradients(double factor) : factor_(factor) {}
  /// Under amp grad() may be scaled, or a part.
  bool possible(const Case& now) const override {
    return gradients_are_plain(now) && !now.setup.precision;
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.edit_gradients(factor_); }));
    for (Parameter& p : now.reference.parameters) {
      if (p.trainable) p.gradient.scale(factor_);
    }
    now.check();
  }
  void show(std::ostream& out) const override { out << "grad() of each times " << factor_; }

 private:
  double factor_;
};

class UpdateByHand : public Command {
 public:
  /// A gradient of no optimizer gives way to a loss of another scale.
  bool possible(const Case& now) const override {
    const auto& all = now.reference.parameters;
    const bool homeless = std::any_of(all.begin(), all.end(), [](const Parameter& p) {
      return p.optimizer < 0 && p.gradient.exists();
    });
    return gradients_are_plain(now) && !(homeless && now.setup.precision);
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.update_by_hand(kRate); }));
    unsigned written = 0;
    Reference& reference = now.reference;
    for (int p = 0; p < kParameters; ++p) {
      Parameter& parameter = reference.parameters[at(p)];
      if (!parameter.trainable || !parameter.gradient.exists()) continue;
      written |= bit(p);
      const Values g = parameter.gradient.mean();
      for (std::size_t i = 0; i < g.size(); ++i) parameter.weight[i] -= kRate * g[i];
    }
    reference.clear(now.all_optimizers());
    for (Parameter& p : reference.parameters) p.gradient = {};
    now.backwards = 0;
    const bool rounds = now.half() || now.travels_rounded();
    now.check({rounds ? written : 0, now.travels_rounded() ? DType::f16 : DType::f32});
  }
  void show(std::ostream& out) const override { out << "the trainer's own step, clear_grad()"; }

 private:
  static constexpr double kRate = 0.0625;
};

/// What a backward of a linear loss leaves, which reduces.
void add_to_ranks(const Case& now, Parameter& own, int p, const Loss& loss) {
  own.gradient.of_rank.resize(at(now.setup.ranks), Values(own.weight.size(), 0.0));
  for (int rank = 0; rank < now.setup.ranks; ++rank) {
    const Values c = loss.coefficients(p, rank);
    Values& sum = own.gradient.of_rank[at(rank)];
    for (std::size_t i = 0; i < c.size(); ++i) sum[i] += now.share() * c[i];
  }
}

class Adopt : public Command {
 public:
  explicit Adopt(Loss loss) : loss_(loss) {
    loss_.by_amp = true;
    loss_.to_all = false;
    loss_.apart = loss_.delayed = loss_.twice = false;
    loss_.overflow_rank = loss_.thrower = -1;
    loss_.form = Form::linear;
  }
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    if (!has_cairns_modules() || !now.setup.precision) return false;
    if (now.any_gradient() || !reference.pending.empty() || reference.may_refuse) return false;
    if (now.setup.wiring.static_graph) return false;
    bool any = false, all = true;
    for (int p = 0; p < kParameters; ++p) {
      const Parameter& own = reference.parameters[at(p)];
      all = all && (loss_.reaches(p) || !own.trainable);
      if (!loss_.reaches(p) || !own.trainable) continue;
      if (own.optimizer < 0) return false;
      any = true;
    }
    return any && (all || now.setup.ranks == 1 || now.finds_unused());
  }
  void run(Case& now) const override {
    Reference& reference = now.reference;
    const bool scaled = reference.scales[at(loss_.id)].value != 1.0;
    reference.unreduced = false;
    reference.summed = now.setup.wiring.sum && now.setup.ranks > 1;
    unsigned reached = 0;
    for (int p = 0; p < kParameters; ++p) {
      Parameter& own = reference.parameters[at(p)];
      if (!loss_.reaches(p) || !own.trainable) continue;
      reached |= bit(own.optimizer);
      add_to_ranks(now, own, p, loss_);
      own.gradient.scaled = scaled;
    }
    must_not_throw(now.system.each([&](Rank& rank) { rank.adopt(loss_, reached); }));
    for (int o = 0; o < static_cast<int>(now.setup.rules.size()); ++o) {
      if ((reached & bit(o)) == 0) continue;
      reference.add_pending({.loss = loss_.id, .given = bit(o), .optimizers = bit(o)});
    }
    ++now.backwards;
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "adopt_gradients(loss " << loss_.id << " of " << loss_.reach << ", size " << loss_.size
        << ")";
  }

 private:
  Loss loss_;
};

/// One that begins anew, with the gradients that are there.
class Replace : public Command {
 public:
  explicit Replace(int optimizer) : optimizer_(optimizer) {}
  bool possible(const Case& now) const override {
    return has_cairns_modules() && !now.setup.precision && !now.reference.may_refuse &&
           optimizer_ < static_cast<int>(now.setup.rules.size());
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.replace(optimizer_); }));
    forget(now);
    now.check();
  }
  /// Of its moments, in the reference.
  void forget(Case& now) const {
    Reference& reference = now.reference;
    reference.positions[at(optimizer_)] = 0;
    for (int p = 0; p < kParameters; ++p) {
      Parameter& own = reference.parameters[at(p)];
      if (own.optimizer != optimizer_) continue;
      own.updates = 0;
      own.first.clear();
      own.second.clear();
      own.optimizer = now.setup.optimizer_of[at(p)];
    }
    std::erase_if(now.added, [&](const auto& added) { return added.second == optimizer_; });
  }
  void show(std::ostream& out) const override {
    out << "a new optimizer in place of " << optimizer_;
  }

 private:
  int optimizer_;
};

/// One element, by hand: the others keep what they have, to the last bit, and so does a half weight
/// that is written with what it has.
class WriteElement : public Command {
 public:
  static constexpr double kWritten = 0.75;
  explicit WriteElement(int parameter) : parameter_(parameter) {}
  /// A module of libtorch's is not written while gradients wait for their step.
  bool possible(const Case& now) const override {
    return has_cairns_modules() || !now.any_gradient();
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.write(parameter_, Write::element); }));
    double& weight = now.reference.parameters[at(parameter_)].weight[0];
    const bool changes = !now.half() || now.in_half(weight) != kWritten;
    if (changes || now.coarse()) weight = kWritten;
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "write the first element of " << kNames[at(parameter_)];
  }

 private:
  int parameter_;
};

/// Two losses that are both scaled before the first backward: each counts by its own scale.
class ScaleTwo : public Command {
 public:
  ScaleTwo(int first, int second) : ids_{first, second} {}
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    if (!has_cairns_modules() || now.setup.wiring.static_graph) return false;
    if (now.setup.wiring.sum && now.setup.ranks > 1) return false;  // which takes one backward
    if (now.any_gradient() || !reference.pending.empty() || reference.may_refuse) return false;
    for (const Parameter& p : reference.parameters) {
      if (p.trainable && p.optimizer >= 0) return now.setup.precision.has_value();
    }
    return false;
  }
  void run(Case& now) const override {
    Reference& reference = now.reference;
    reference.unreduced = false;
    Loss first{.id = ids_[0], .size = 0.5}, second{.id = ids_[1], .size = 0.125};
    must_not_throw(now.system.each([&](Rank& rank) { rank.scale_two(first, second); }));
    for (const Loss& loss : {first, second}) {
      for (int p = 0; p < kParameters; ++p) {
        Parameter& own = reference.parameters[at(p)];
        if (!own.trainable) continue;
        own.gradient.scaled = own.gradient.scaled || reference.scales[at(loss.id)].value != 1.0;
        add_to_ranks(now, own, p, loss);
      }
      const unsigned all = now.all_optimizers();
      reference.add_pending({.loss = loss.id, .given = all, .optimizers = all});
    }
    now.backwards += 2;
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "scale_loss(loss " << ids_[0] << "), scale_loss(loss " << ids_[1] << "), both backwards";
  }

 private:
  std::array<int, 2> ids_;
};

/// grad() is the whole gradient, at the loss scale, or an error: never a part of it.
class ReadGradient : public Command {
 public:
  explicit ReadGradient(int parameter) : parameter_(parameter) {}
  bool possible(const Case& now) const override {
    const Parameter& own = now.reference.parameters[at(parameter_)];
    return gradients_are_plain(now) && own.trainable && own.optimizer >= 0 && !now.coarse();
  }
  void run(Case& now) const override {
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { return rank.read_gradient(parameter_); });
    must_not_throw(outcome);
    const Gradient& gradient = now.reference.parameters[at(parameter_)].gradient;
    if (outcome.numbers.empty()) {
      if (gradient.exists() && !now.setup.precision)
        throw Mismatch("expected a gradient, got none");
      return now.check();
    }
    if (!gradient.exists()) throw Mismatch("expected no gradient, got one");
    const Values whole = gradient.mean();
    if (whole[0] == 0) return now.check();  // at any scale
    const double seen = outcome.numbers[0] / whole[0],
                 scale = std::exp2(std::round(std::log2(seen)));
    double sent = 0;  // what ranks send: their mean may be far smaller
    for (const Values& own : gradient.of_rank) {
      for (const double g : own) sent = std::max(sent, std::abs(g));
    }
    const double rounded = now.travels_rounded() ? 2e-3 * sent : 1e-4 * std::abs(whole[0]);
    if (std::abs(scale - seen) * std::abs(whole[0]) > rounded * scale)
      throw Mismatch("grad() holds a part of the gradient");
    Values scaled = whole;
    for (double& g : scaled) g *= scale;
    compare("grad()", outcome.numbers, scaled,
            Tolerance(now.travels_rounded() ? rounded * scale : 0.0, 2e-3));
    now.check();
  }
  void show(std::ostream& out) const override { out << kNames[at(parameter_)] << ".grad()"; }

 private:
  int parameter_;
};

/// It works as if it had not moved, its claim on its parameters included (GiveToAnother).
class MoveOptimizer : public Command {
 public:
  explicit MoveOptimizer(int optimizer) : optimizer_(optimizer) {}
  /// A schedule takes the rates that it finds for its base, those of groups that were added too.
  bool possible(const Case& now) const override {
    return has_cairns_modules() && !now.setup.precision && now.added.empty() &&
           optimizer_ < static_cast<int>(now.setup.rules.size()) &&
           !now.setup.rules[at(optimizer_)].larc && now.reference.positions[at(optimizer_)] == 0;
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.move_optimizer(optimizer_); }));
    now.check();
  }
  void show(std::ostream& out) const override { out << "optimizer " << optimizer_ << " moves"; }

 private:
  int optimizer_;
};

/// The step is refused while a loss has said that more of its backwards follow, whatever came
/// after.
class DelayUnscale : public Command {
 public:
  DelayUnscale(int id, bool another) : id_(id), another_(another) {}
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    if (!has_cairns_modules() || now.setup.ranks > 1 || now.setup.wiring.static_graph) return false;
    if (now.any_gradient() || !reference.pending.empty() || reference.may_refuse) return false;
    for (const Parameter& p : reference.parameters) {
      if (p.trainable && p.optimizer >= 0) return now.setup.precision.has_value();
    }
    return false;
  }
  void run(Case& now) const override {
    const Loss loss{.id = id_, .size = 0.5};
    must_not_throw(now.system.each([&](Rank& rank) { rank.backward_delayed(loss); }));
    Loss other = loss;
    other.id = 1 - id_;
    if (another_)
      must_not_throw(now.system.each([&](Rank& rank) { rank.backward(other, true, 0); }));
    const auto step = [](Rank& rank) { return rank.step({}); };
    if (!now.system.each(step).threw())
      throw Mismatch("expected an error in a step before the last backward, got none");
    must_not_throw(now.system.each([&](Rank& rank) { rank.backward(loss, true, 0); }));
    must_not_throw(now.system.each([](Rank& rank) { rank.clear_module(); }));
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "delay_unscale on loss " << id_ << (another_ ? ", backward of the other" : "")
        << ", step";
  }

 private:
  int id_;
  bool another_;
};

/// Gradients without a loss scale, edited ahead of their step.
class Unscale : public Command {
 public:
  Unscale(int optimizer, double factor) : optimizer_(optimizer), factor_(factor) {}
  bool possible(const Case& now) const override {
    if (!has_cairns_modules() || !now.setup.precision || now.reference.may_refuse) return false;
    if (optimizer_ >= static_cast<int>(now.setup.rules.size())) return false;
    const auto& all = now.reference.parameters;
    return gradients(now) != 0 && std::none_of(all.begin(), all.end(), [&](const Parameter& p) {
             return p.optimizer == optimizer_ && p.gradient.plain;
           });
  }
  void run(Case& now) const override {
    const unsigned own = gradients(now);
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { return rank.unscale(optimizer_, own, factor_); });
    must_not_throw(outcome);
    Values expected;
    for (int p = 0; p < kParameters; ++p) {
      if ((own & bit(p)) == 0) continue;
      Gradient& gradient = now.reference.parameters[at(p)].gradient;
      const Values mean = gradient.mean();
      expected.insert(expected.end(), mean.begin(), mean.end());
      gradient.scale(factor_);
      gradient.scaled = false;
    }
    const bool rounds = now.coarse() || now.travels_rounded();
    if (!outcome.numbers.empty())
      compare("unscaled gradients", outcome.numbers, expected, rounds ? 0.05 : kExact);
    now.reference.ranks_differ = false;
    now.reduced_by(bit(optimizer_));
    now.reference.summed = now.setup.wiring.sum && now.setup.ranks > 1;
    now.check();
  }
  void show(std::ostream& out) const override {
    out << "precision.unscale(optimizer " << optimizer_ << "), grad() of each times " << factor_;
  }

 private:
  /// The optimizer's parameters that have one.
  unsigned gradients(const Case& now) const {
    unsigned own = 0;
    for (int p = 0; p < kParameters; ++p) {
      const Parameter& parameter = now.reference.parameters[at(p)];
      const bool has = parameter.trainable && parameter.gradient.exists();
      if (has && parameter.optimizer == optimizer_) own |= bit(p);
    }
    return own;
  }
  int optimizer_;
  double factor_;
};

/// A call of libtorch's that is left in a loop between backward and step: an error, and nothing is
/// lost once the gradients are cleared.
class WriteByTorch : public Command {
 public:
  WriteByTorch(int id, bool gradients) : id_(id), gradients_(gradients) {}
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    if (has_cairns_modules() || now.any_gradient() || !reference.pending.empty()) return false;
    if (reference.may_refuse || now.setup.wiring.static_odd_reach != 0) return false;
    if (!now.setup.precision || reference.scales[at(id_)].value == 1.0) return false;
    const auto& all = reference.parameters;
    return std::any_of(all.begin(), all.end(),
                       [](const Parameter& p) { return p.trainable && p.optimizer >= 0; });
  }
  void run(Case& now) const override {
    const Loss loss{.id = id_, .size = 0.5};
    must_not_throw(now.system.each([&](Rank& rank) { rank.backward(loss, true, 0); }));
    must_not_throw(now.system.each([&](Rank& rank) { rank.write_by_torch(gradients_); }));
    if (!now.system.each([](Rank& rank) { return rank.step({}); }).threw())
      throw Mismatch("expected an error in a step after a write of libtorch's, got none");
    must_not_throw(now.system.each([](Rank& rank) { rank.clear_module(); }));
    for (int p = 0; p < kParameters && !gradients_; ++p) {
      must_not_throw(now.system.each([&](Rank& rank) { rank.write(p, Write::initialise); }));
      Values& weight = now.reference.parameters[at(p)].weight;
      weight.assign(weight.size(), 0.5);
    }
    now.check({now.half() && !gradients_ ? kAll : 0});  // masters keep bits below those of a half
  }
  void show(std::ostream& out) const override {
    out << "backward(loss " << id_ << "), "
        << (gradients_ ? "clip_grad_norm_ of libtorch's" : "a step of torch::optim's") << ", step";
  }

 private:
  int id_;
  bool gradients_;
};

/// A trainer without amp that scales its losses itself.
class ScaledSteps : public Command {
 public:
  ScaledSteps(double size, int overflow_at) : overflow_at_(overflow_at) {
    loss_.size = size;
    loss_.by_amp = false;
  }
  bool possible(const Case& now) const override {
    const Reference& reference = now.reference;
    if (!has_cairns_modules() || now.setup.precision || now.any_gradient()) return false;
    if (reference.may_refuse || now.setup.wiring.static_odd_reach != 0) return false;
    const auto& all = reference.parameters;
    return (overflow_at_ < 0 || all[0].trainable) &&
           std::all_of(all.begin(), all.end(),
                       [](const Parameter& p) { return p.optimizer == 0; }) &&
           std::any_of(all.begin(), all.end(), [](const Parameter& p) { return p.trainable; });
  }
  void run(Case& now) const override {
    const System::Outcome outcome =
        now.system.each([&](Rank& rank) { return rank.scaled_steps(loss_, overflow_at_); });
    must_not_throw(outcome);
    Scale scale{.dynamic = true, .value = 16.0};
    Values expected;
    for (int k = 0; k < Rank::kScaledSteps; ++k) {
      const bool overflows = k == overflow_at_;
      expected.push_back(scale.value);
      expected.push_back(overflows ? 0.0 : 1.0);
      scale.update(overflows);
      if (!overflows) step(now);
    }
    compare("scales and whether steps were applied", outcome.numbers, expected, 0.0);
    const bool bf16 = now.setup.bf16_moments;
    now.check({now.coarse() || now.travels_rounded() || bf16 ? kAll : 0, bf16 ? DType::bf16
                                                                         : now.travels_rounded()
                                                                             ? DType::f16
                                                                             : DType::f32});
  }
  void show(std::ostream& out) const override {
    out << Rank::kScaledSteps << " steps of a ScaledStep, size " << loss_.size;
    if (overflow_at_ >= 0) out << ", inf in step " << overflow_at_;
  }

 private:
  void step(Case& now) const {
    for (int p = 0; p < kParameters; ++p) {
      Parameter& own = now.reference.parameters[at(p)];
      if (!own.trainable) continue;
      for (int rank = 0; rank < now.setup.ranks; ++rank) {
        Values g = loss_.coefficients(p, rank);
        for (double& x : g) x *= now.share();
        own.gradient.of_rank.push_back(g);
      }
    }
    now.reference.update(0, 0.0);
    for (Parameter& own : now.reference.parameters) own.gradient = {};
  }
  Loss loss_;
  int overflow_at_;
};

/// An optimizer moves, or another takes its place, while amp holds it: amp is told by a release and
/// another initialize, and refuses until then.
class ReplaceUnderAmp : public Command {
 public:
  ReplaceUnderAmp(int optimizer, bool moves) : optimizer_(optimizer), moves_(moves) {}
  bool possible(const Case& now) const override {
    if (!has_cairns_modules() || !now.setup.precision || now.reference.may_refuse) return false;
    if (optimizer_ >= static_cast<int>(now.setup.rules.size()) || !now.added.empty()) return false;
    const Rule& rule = now.setup.rules[at(optimizer_)];
    return now.masters && (!moves_ || (!rule.larc && now.reference.positions[at(optimizer_)] == 0));
  }
  void run(Case& now) const override {
    if (moves_) must_be_refused(now);
    must_not_throw(now.system.each([](Rank& rank) { rank.release(); }));
    if (!moves_) must_not_throw(now.system.each([&](Rank& rank) { rank.replace(optimizer_); }));
    must_not_throw(now.system.each([&](Rank& rank) { rank.initialize(*now.setup.precision); }));
    now.reference.forget_pending();
    now.backwards = 0;
    if (!moves_) Replace(optimizer_).forget(now);
    now.reference.scales.assign(kLosses, now.setup.precision->scale_of_loss());
    now.check({now.rounded_by_cast(), DType::f32, true});
  }
  void show(std::ostream& out) const override {
    if (moves_) {
      out << "optimizer " << optimizer_ << " moves, release() and initialize()";
    } else {
      out << "release(), a new optimizer in place of " << optimizer_ << ", initialize()";
    }
  }

 private:
  void must_be_refused(Case& now) const {
    must_not_throw(now.system.each([&](Rank& rank) { rank.move_optimizer(optimizer_); }));
    if (!now.system.each([](Rank& rank) { return rank.step({}); }).threw())
      throw Mismatch("expected an error in amp's step of an optimizer that was moved, got none");
  }
  int optimizer_;
  bool moves_;
};

/// An average of the weights, and the model with it for a while.
class AverageWeights : public Command {
 public:
  explicit AverageWeights(bool use) : use_(use) {}
  bool possible(const Case& /*now*/) const override { return has_cairns_modules(); }
  void run(Case& now) const override {
    must_not_throw(now.system.each([](Rank& rank) {
      rank.set_average(true);
      rank.update_average();
    }));
    Reference& reference = now.reference;
    if (!reference.average) reference.average = Average{.equal = now.setup.rules.size() > 1};
    reference.average->update(reference.parameters);
    now.check();
    if (use_) use(now);
  }
  void show(std::ostream& out) const override {
    out << "average.update()" << (use_ ? ", average.use()" : "");
  }

 private:
  static void use(Case& now) {
    const System::Outcome outcome = now.system.each([](Rank& rank) { return rank.use_average(); });
    must_not_throw(outcome);
    if (outcome.numbers.empty())
      throw Mismatch("the averages were in use: expected no trace of it");
    Values expected;
    for (const Values& own : now.reference.average->values)
      expected.insert(expected.end(), own.begin(), own.end());
    compare("averages in the model", outcome.numbers, expected,
            Tolerance(kExact, (now.coarse() ? 0x1.1p-8 : 0.0) + kExact));
    now.check();
  }
  bool use_;
};

}  // namespace

rc::Gen<CommandPtr> own_commands() {
  return rc::gen::weightedOneOf<CommandPtr>({
      {2, make<EditGradients>(choice<double>({{1, 0.5}, {1, 2.0}}))},
      {2, make<UpdateByHand>()},
      {2, make<Adopt>(losses())},
      {1, make<Replace>(one_of(2))},
      {2, make<WriteElement>(one_of(kParameters))},
      {2, make<ScaleTwo>(one_of(kLosses), one_of(kLosses))},
      {2, make<ReadGradient>(one_of(kParameters))},
      {2, make<MoveOptimizer>(one_of(2))},
      {2, make<DelayUnscale>(one_of(kLosses), mostly())},
      {4, make<Unscale>(one_of(2), choice<double>({{1, 0.5}, {1, 2.0}}))},
      {2, make<ScaledSteps>(choice<double>({{1, 0.5}, {1, 0x1p-6}}),
                            choice<int>({{2, -1}, {1, 0}, {1, 2}}))},
      {2, make<WriteByTorch>(one_of(kLosses), rc::gen::arbitrary<bool>())},
      {1, make<ReplaceUnderAmp>(one_of(2), rc::gen::arbitrary<bool>())},
      {3, make<AverageWeights>(rc::gen::arbitrary<bool>())},
  });
}

}  // namespace cairn::stateful
