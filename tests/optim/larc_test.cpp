#include "cairn/optim/larc.h"

#include <cmath>
#include <utility>

#include "reference.h"
#include "support.h"

namespace cairn::optim {
namespace {

using test::less;

/// What apex.parallel.LARC makes of a gradient.
Values larc_gradient(const Values& w, Values g, const LarcOptions& options, double lr,
                     double decay) {
  const double p = test::norm_of(w), n = test::norm_of(g);
  if (p == 0 || n == 0) return g;
  double a = options.trust_coefficient * p / (n + decay * p + options.eps);
  if (options.clip) a = std::min(a / lr, 1.0);
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = (g[i] + decay * w[i]) * a;
  return g;
}

struct LarcCase {
  Device device;
  DType dtype;
  MasterStorage masters;
  bool clip;
};

class Larc : public testing::TestWithParam<LarcCase> {
 protected:
  /// Trains five steps within LARC, against the reference of its gradients without weight decay.
  template <class Reference>
  void run(decltype(Reference::options) rule) {
    const LarcCase& c = GetParam();
    const LarcOptions options{.trust_coefficient = 0.02, .clip = c.clip};
    const double scale = 1.0 / 128;
    const NamedTensors parameters = {make_parameter("a", {33, 5}, 1, c.dtype, c.device),
                                     make_parameter("b", {7}, 2, c.dtype, c.device),
                                     make_parameter("zero", {4}, 3, c.dtype, c.device)};
    kernels::fill(parameters[2].tensor, 0.0);
    typename Reference::Optimizer optimizer(parameters, rule);
    optimizer.set_state_options({.masters = c.masters});
    const LARC larc(optimizer, options);
    const double decay = std::exchange(rule.weight_decay, 0.0);
    std::vector<Reference> references(3, Reference{rule});
    std::vector<Values> expected = values(parameters);
    for (std::uint64_t step = 0; step < 5; ++step) {
      write_gradients(parameters, 10 * step, 100.0);
      for (std::size_t i = 0; i < 3; ++i) {
        Values g = values(parameters[i].tensor.grad());
        for (double& x : g) x *= scale;
        references[i].update(expected[i], larc_gradient(expected[i], g, options, rule.lr, decay));
      }
      expect_applied(larc.optimizer().step({.gradient_scale = scale}));
      EXPECT_EQ(optimizer.groups()[0].weight_decay, decay);
    }
    // With remainders the norms are of the bf16 weights.
    const double tolerance = c.masters == MasterStorage::remainder ? 1e-3 : 1e-5;
    expect_weights(parameters, expected, tolerance, tolerance);
  }
};

TEST_P(Larc, AdamAndSgdGetItsGradients) {
  run<reference::Adam>({.lr = 0.05, .weight_decay = 0.1});
  run<reference::Sgd>({.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1});
}

std::vector<LarcCase> larc_cases() {
  std::vector<LarcCase> all;
  for (const Device device : test::devices()) {
    for (const bool clip : {true, false}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        all.push_back({device, dtype, MasterStorage::f32, clip});
      }
      all.push_back({device, DType::bf16, MasterStorage::remainder, clip});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, Larc, testing::ValuesIn(larc_cases()));

TEST(Larc, ReadsNormsOfGradientsThatEachGroupHasClipped) {
  std::vector<Values> weights;
  for (const bool by_hand : {false, true}) {
    const NamedTensors both = {make_parameter("a", {4}, 1), make_parameter("b", {9}, 2)};
    FusedSGD optimizer({{{both[0]}, 0.1, 0.1}, {{both[1]}, 0.1, 0.1}}, {.lr = 0.1});
    LARC larc(optimizer);
    // Norms 8 and 6, each clipped to 1.
    write_gradient(both[0].tensor, Values(4, by_hand ? 0.5 : 4.0));
    write_gradient(both[1].tensor, Values(9, by_hand ? 1.0 / 3 : 2.0));
    expect_applied(by_hand ? larc.step()
                           : larc.step({.max_gradient_norm = 1.0, .per_group_norm = true}));
    weights.push_back(values(both[0].tensor));
    weights.push_back(values(both[1].tensor));
  }
  test::expect_close(weights[0], weights[2], 1e-6, 1e-6);
  test::expect_close(weights[1], weights[3], 1e-6, 1e-6);
}

// A weight of a group that came later may have a master that its first step turns to a remainder.
TEST(Larc, WithRemaindersMeasuresHalfWeightsFromTheFirstStepOn) {
  const NamedTensor weight = make_parameter("a", {4}, 1, DType::bf16);
  kernels::MasterWeight::assign(weight.tensor, Tensor::full({4}, 1.1));  // 1.1015625 as bf16
  FusedSGD optimizer({weight}, {.lr = 1.0});
  optimizer.set_state_options({.masters = MasterStorage::remainder});
  LARC larc(optimizer, {.clip = false});
  for (const double expected : {1.1 - 0.02 * 1.1015625, 1.1 - 0.02 * (1.1015625 + 1.078125)}) {
    write_gradient(weight.tensor, Values(4, 1.0));
    expect_applied(larc.step());
    test::expect_close(exact(weight.tensor), Values(4, expected), 1e-6, 1e-6);
  }
}

TEST(Larc, EndsWithTheWrapper) {
  const NamedTensors parameters = {make_parameter("a", {5}, 1)};
  FusedSGD optimizer(parameters, {.lr = 1.0});
  {
    LARC larc(optimizer);
    EXPECT_THROW(LARC second(optimizer), core::InvalidArgument);
    EXPECT_EQ(larc.options().trust_coefficient, 0.02);
    write_gradients(parameters, 1);
    EXPECT_THROW((void)optimizer.update({}, {}), core::InvalidArgument);  // needs norms
    expect_applied(larc.step({.check = false}));
  }
  const Values before = values(parameters[0].tensor);
  write_gradient(parameters[0].tensor, Values(5, 0.5));
  expect_applied(optimizer.step());
  test::expect_close(parameters[0].tensor, less(before, 0.5), 1e-6, 1e-6);
}

TEST(Larc, RefusesRulesThatLookAtNormsAndBadOptions) {
  const NamedTensors parameters = {make_parameter("a", {5}, 1)};
  FusedNovoGrad novograd(parameters);
  EXPECT_THROW(LARC larc(novograd), core::InvalidArgument);
  FusedLAMB clipping(parameters);
  EXPECT_THROW(LARC larc(clipping), core::InvalidArgument);
  FusedSGD sgd(parameters, {});
  EXPECT_THROW(LARC larc(sgd, {.trust_coefficient = -1}), core::InvalidArgument);
  EXPECT_THROW(LARC larc(sgd, {.eps = NAN}), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::optim
