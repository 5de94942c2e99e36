#include "case.h"

#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/core/half.h"

namespace cairn::stateful {

namespace {

/// Of a bf16 number and the next: a value between two may be rounded to either.
constexpr double kBf16Step = 0x1p-7;

/// One rounding to that dtype, relative.
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
  if (!over) check(rounded_by_cast());
}

/// Data parallelism wants one arena: it may ask to be built before optimizers that share it out.
void Case::build(bool fresh) {
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
    if (!parameter.trainable || parameter.optimizer < 0) frozen |= bit(p);
  }
  return frozen;
}

/// A DDP of each submodule calls them outside of the model's region.
bool Case::autocasts(const Loss& loss) const {
  const bool in_region = !(setup.ddp && setup.wiring.two_ddps && loss.by_ddp);
  return in_region && setup.precision && setup.precision->level == amp::OptLevel::O1;
}

Values Case::weight_in_product(int parameter, const Loss& loss) const {
  Values weight = reference.parameters[at(parameter)].raw;
  if (!autocasts(loss)) return weight;
  const bool f16 = setup.precision->half == DType::f16;
  for (double& w : weight) w = f16 ? rounded_to_f16(w) : rounded_to_bf16(w);
  return weight;
}

Values Case::gradient_of(const Loss& loss, int parameter, int rank) const {
  if (loss.form == Form::linear) return loss.coefficients(parameter, rank);
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
    if (expected.optimizer >= 0 && own.updates && *own.updates != expected.updates) {
      throw Mismatch(
          core::str(name, ": expected ", expected.updates, " updates, got ", *own.updates));
    }
    std::vector<Values*> moments;
    const Rule& rule = reference.rules[at(std::max(expected.optimizer, 0))];
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
      compare(which, own.moments[m], *moments[m],
              setup.bf16_moments ? std::max(kBf16Step, tolerance) : tolerance);
      if (setup.bf16_moments && !(m == 1 && rule.kind == Kind::novograd)) {
        must_be_bf16(which, own.moments[m]);
      }
      if (follows || nets || setup.bf16_moments) *moments[m] = own.moments[m];
    }
    // What weights differ by in f32 comes back in the gradients of a net, times as much.
    if (follows || nets) expected.weight = own.weight;
    expected.raw = own.raw;
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

}  // namespace cairn::stateful
