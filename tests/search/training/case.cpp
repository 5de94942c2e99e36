#include "case.h"

#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/core/half.h"

namespace cairn::stateful {

namespace {

/// Of a bf16 number and the next: a value between two may be rounded to either.
constexpr double kBf16Step = 0x1p-7;

/// What a rounding to that dtype changes at most, relative.
double rounding(DType dtype) {
  if (dtype == DType::f16) return 0x1p-11;
  return dtype == DType::bf16 ? 0x1p-8 : 0.0;
}

void must_be_bf16(const std::string& what, const Values& seen) {
  for (const double x : seen) {
    if (rounded_to_bf16(x) != x) throw Mismatch(core::str(what, ": expected bf16, got ", x));
  }
}

}  // namespace

void compare(const std::string& what, const Values& seen, const Values& expected,
             const Tolerance& tolerance) {
  if (seen.size() != expected.size()) {
    throw Mismatch(core::str(what, ": expected ", expected.size(), " values, got ", seen.size()));
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const double bound = tolerance.absolute + tolerance.relative * std::abs(expected[i]);
    if (std::abs(seen[i] - expected[i]) <= bound) continue;
    throw Mismatch(core::str(what, "[", i, "]: expected ", expected[i], ", got ", seen[i],
                             " (tolerance ", bound, ")"));
  }
}

void must_not_throw(const System::Outcome& outcome) {
  if (outcome.threw()) throw Mismatch("expected no error, got: " + outcome.error);
}

bool keeps_masters(const std::optional<Precision>& precision, bool before) {
  if (!precision) return before;
  if (precision->level == amp::OptLevel::O2) return true;
  return precision->level != amp::OptLevel::O3 && before;
}

Case::Case(const Setup& s) : setup(s), system(s) {
  reference.rules = s.rules;
  reference.bf16_moments = s.bf16_moments;
  reference.positions.assign(s.rules.size(), 0);
  reference.skips.assign(s.rules.size(), Answer::no);
  const Scale scale = s.precision ? s.precision->scale_of_loss() : Scale();
  reference.scales.assign(kLosses, scale);
  for (int p = 0; p < kParameters; ++p) {
    Parameter parameter;
    parameter.weight = initial_weight(p, false);
    parameter.optimizer = s.optimizer_of[at(p)];
    parameter.group = s.group_of(p);
    parameter.trainable = (s.frozen & bit(p)) == 0;
    reference.parameters.push_back(parameter);
  }
  build(false);
  masters = keeps_masters(s.precision, true);
  if (!over) check({rounded_by_cast(), DType::f32, true});
}

/// Data parallelism wants one arena: it may ask to be built before optimizers that share it out.
void Case::build(bool fresh) {
  Statistics statistics;
  for (std::size_t part = 0; part < 2; ++part) {
    const auto channels = static_cast<std::size_t>(kSizes[2 * part + 1]);
    statistics.mean[part].assign(channels, 0.0);
    statistics.var[part].assign(channels, 1.0);
  }
  reference.statistics.assign(at(setup.ranks), statistics);
  const System::Outcome built = system.rebuild(setup, fresh);
  const bool shared_out = setup.rules.size() > 1 || setup.wiring.two_ddps ||
                          std::any_of(setup.optimizer_of.begin(), setup.optimizer_of.end(),
                                      [](int o) { return o < 0; });
  over = built.threw() && setup.ddp && setup.order != Order::ddp_optimizer_amp && shared_out;
  if (built.threw() && !over) throw Mismatch("building threw: " + built.error);
}

bool Case::half() const {
  if (!setup.precision) return core::is_half(dtype);
  return setup.precision->level == amp::OptLevel::O2 || setup.precision->level == amp::OptLevel::O3;
}

double Case::in_half(double weight) const {
  const DType half = setup.precision ? setup.precision->half : dtype;
  return half == DType::f16 ? rounded_to_f16(weight) : rounded_to_bf16(weight);
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
  if (setup.precision) return 0;
  unsigned frozen = 0;  // cast by hand
  for (int p = 0; p < kParameters; ++p) {
    const Parameter& parameter = reference.parameters[at(p)];
    if (!parameter.trainable) frozen |= bit(p);
  }
  return frozen;
}

/// A DDP of each submodule calls them outside of the model's region, and so does who calls a module
/// of libtorch's itself.
bool Case::autocasts(const Loss& loss) const {
  const bool in_region =
      has_cairns_modules() ? !(setup.ddp && setup.wiring.two_ddps && loss.by_ddp) : loss.by_ddp;
  return in_region && setup.precision && setup.precision->level == amp::OptLevel::O1;
}

Values Case::weight_in_product(int parameter, const Loss& loss) const {
  Values weight = reference.parameters[at(parameter)].raw;
  if (!autocasts(loss)) return weight;
  for (double& w : weight) w = in_half(w);
  return weight;
}

test::BatchNormReference Case::norm_of(const Loss& loss, int part, int rank) const {
  const int matrix = 2 * part;
  const Values c = loss.coefficients(matrix, rank);
  const Values w = weight_in_product(matrix, loss), v = weight_in_product(matrix + 1, loss);
  const bool all = setup.wiring.sync_norm;
  const int first = all ? 0 : rank, end = all ? setup.ranks : rank + 1;
  test::BatchNormReference norm;
  norm.eps = NormBatch::kEps;
  norm.weight.assign(v.size(), 1.0);
  norm.bias.assign(v.size(), 0.0);
  for (int r = first; r < end; ++r) {
    for (std::size_t k = 0; k < NormBatch::kSamples; ++k) {
      for (std::size_t i = 0; i < v.size(); ++i) {
        norm.x.push_back(NormBatch::x(k, i, r) * v[i] + NormBatch::z(k, i, r));
        norm.dy.push_back(NormBatch::d(k, r) * c[i] * w[i]);
      }
    }
  }
  const auto channels = static_cast<std::int64_t>(v.size());
  norm.shape = {static_cast<std::int64_t>(norm.x.size()) / channels, channels};
  norm.run();
  return norm;
}

void Case::follow_batch(const Loss& loss) {
  for (int rank = 0; rank < setup.ranks; ++rank) {
    for (int part = 0; part < 2; ++part) {
      if (!loss.reaches(2 * part, rank)) continue;
      const test::BatchNormReference norm = norm_of(loss, part, rank);
      const double unbiased = norm.count() / (norm.count() - 1);
      const auto follow = [](Values& running, const Values& batch, double factor) {
        for (std::size_t i = 0; i < running.size(); ++i) {
          running[i] += NormBatch::kMomentum * (factor * batch[i] - running[i]);
        }
      };
      Statistics& own = reference.statistics[at(rank)];
      follow(own.mean[at(part)], norm.mean, 1.0);
      follow(own.var[at(part)], norm.var, unbiased);
    }
  }
}

Values Case::gradient_of_norm(const Loss& loss, int parameter, int rank) const {
  const test::BatchNormReference norm = norm_of(loss, parameter / 2, rank);
  const std::size_t channels = norm.channels();
  const std::size_t begin = setup.wiring.sync_norm ? at(rank) * NormBatch::kSamples * channels : 0;
  Values c = loss.coefficients(parameter - parameter % 2, rank);
  Values gradient(channels, 0.0);
  for (std::size_t k = 0; k < NormBatch::kSamples; ++k) {
    for (std::size_t i = 0; i < channels; ++i) {
      const std::size_t element = begin + k * channels + i;
      gradient[i] += parameter % 2 == 0 ? NormBatch::d(k, rank) * c[i] * norm.y[element]
                                        : NormBatch::x(k, i, rank) * norm.dx[element];
    }
  }
  if (parameter % 2 != 0) return gradient;
  std::copy(gradient.begin(), gradient.end(), c.begin());
  return c;
}

Values Case::gradient_of(const Loss& loss, int parameter, int rank) const {
  if (loss.form == Form::linear) return loss.coefficients(parameter, rank);
  if (loss.form == Form::norm) return gradient_of_norm(loss, parameter, rank);
  const int matrix = parameter - parameter % 2;
  const Values c = loss.coefficients(matrix, rank);
  const Values v = weight_in_product(matrix + 1, loss);
  if (parameter == matrix) return matrix_gradient(loss.form, c, v);
  return vector_gradient(loss.form, c, weight_in_product(matrix, loss), v);
}

bool Case::any_gradient() const {
  return std::any_of(reference.parameters.begin(), reference.parameters.end(),
                     [](const Parameter& p) { return p.gradient.exists(); });
}

void Case::check(const Rounds& rounds) {
  const Rank::Seen seen = system.look();
  for (int p = 0; p < kParameters; ++p) {
    const Rank::Seen::Parameter& own = seen.parameters[at(p)];
    Parameter& expected = reference.parameters[at(p)];
    const std::string name = kNames[at(p)];
    const bool follows = (rounds.parameters & bit(p)) != 0;
    const double both = rounding(own.dtype) + rounding(rounds.through);
    const bool calculated = follows && !rounds.once;
    const double tolerance = calculated ? 16 * both + kExact : kExact;
    const Rule& rule = reference.rules[at(std::max(expected.optimizer, 0))];
    // LAMB's weight follows moments that may have been rounded to either side.
    const bool halved_lamb = setup.bf16_moments && rule.kind == Kind::lamb;
    const double either_side =
        halved_lamb ? 2 * kBf16Step * rule.lr * stateful::norm_of(expected.weight) : 0.0;
    compare(name, own.weight, expected.weight,
            follows && rounds.once ? Tolerance(kExact, 1.01 * both + kExact)
                                   : Tolerance(tolerance + either_side, tolerance));
    compare(name + " as forward sees it", own.raw, own.weight, 1.001 * rounding(own.dtype));
    if (expected.optimizer >= 0 && own.updates && *own.updates != expected.updates) {
      throw Mismatch(
          core::str(name, ": expected ", expected.updates, " updates, got ", *own.updates));
    }
    std::vector<Values*> moments;
    const int kept = rule.moments();
    if (kept > 0) moments.push_back(&expected.first);
    if (kept > 1) moments.push_back(&expected.second);
    if (expected.updates == 0) moments.clear();
    if (own.moments.size() != moments.size()) {
      throw Mismatch(
          core::str(name, ": expected ", moments.size(), " moments, got ", own.moments.size()));
    }
    for (std::size_t m = 0; m < moments.size(); ++m) {
      const std::string which = core::str("moment ", m, " of ", name);
      const bool halved = setup.bf16_moments && !(m == 1 && rule.kind == Kind::novograd);
      compare(which, own.moments[m], *moments[m],
              Tolerance(tolerance, halved ? std::max(kBf16Step, tolerance) : tolerance));
      if (halved) must_be_bf16(which, own.moments[m]);
      if (calculated || halved) *moments[m] = own.moments[m];
    }
    if (follows || halved_lamb) expected.weight = own.weight;
    expected.raw = own.raw;
  }
  reference.raw_norms = setup.remainders && half();
  check_statistics(rounds.once);
  for (const std::string& name : seen.named) {
    if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) continue;
    throw Mismatch("expected a parameter's full name, got '" + name + "'");
  }
  const std::size_t averages = reference.average ? reference.average->values.size() : 0;
  if (seen.averages.size() != averages) {
    throw Mismatch(core::str("expected ", averages, " averages, got ", seen.averages.size()));
  }
  for (std::size_t p = 0; p < averages; ++p) {
    compare(core::str("average of ", kNames[p]), seen.averages[p], reference.average->values[p],
            kExact);
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

void Case::check_statistics(bool rounded) {
  const std::vector<Numbers> seen = system.statistics();
  for (std::size_t rank = 0; rank < seen.size() && !seen[rank].empty(); ++rank) {
    Statistics& own = reference.statistics[rank];
    Values expected;
    std::vector<double*> places;
    for (std::size_t part = 0; part < 2; ++part) {
      for (Values* values : {&own.mean[part], &own.var[part]}) {
        for (double& x : *values) {
          expected.push_back(x);
          places.push_back(&x);
        }
      }
    }
    compare(core::str("running statistics of rank ", rank), seen[rank], expected,
            Tolerance(kExact, (rounded ? 0x1.1p-8 : 0.0) + kExact));
    if (!rounded) continue;
    for (std::size_t i = 0; i < places.size(); ++i) *places[i] = seen[rank][i];
  }
}

}  // namespace cairn::stateful
