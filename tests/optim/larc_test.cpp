#include "cairn/optim/larc.h"

#include <gmock/gmock.h>

#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/sgd.h"
#include "reference.h"
#include "support.h"
#include "support/step.h"

namespace cairn::optim {
namespace {

using reference::Values;

double norm_of(const Values& values) {
  double sum = 0.0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

/// What apex.parallel.LARC makes of a gradient.
Values larc_gradient(const Values& w, Values g, const LarcOptions& options, double lr,
                     double decay) {
  const double p = norm_of(w), n = norm_of(g);
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

class Larc : public testing::TestWithParam<LarcCase> {};

TEST_P(Larc, AdamAndSgdGetItsGradients) {
  const LarcCase& c = GetParam();
  const LarcOptions options{.trust_coefficient = 0.02, .clip = c.clip};
  const double decay = 0.1, lr = 0.05, scale = 1.0 / 128;
  for (const bool adam : {true, false}) {
    NamedTensors parameters = {make_parameter("a", {33, 5}, 1, c.dtype, c.device),
                               make_parameter("b", {7}, 2, c.dtype, c.device),
                               make_parameter("zero", {4}, 3, c.dtype, c.device)};
    kernels::fill(parameters[2].tensor, 0.0);
    std::unique_ptr<Optimizer> optimizer;
    const AdamOptions adam_options{.lr = lr, .weight_decay = decay};
    const SgdOptions sgd_options{.lr = lr, .momentum = 0.9, .weight_decay = decay};
    if (adam)
      optimizer = std::make_unique<FusedAdam>(parameters, adam_options);
    else
      optimizer = std::make_unique<FusedSGD>(parameters, sgd_options);
    optimizer->set_state_options({.masters = c.masters});
    const LARC larc(*optimizer, options);
    std::vector<reference::Adam> adams(3, {{.lr = lr, .weight_decay = 0}});
    std::vector<reference::Sgd> sgds(3, {{.lr = lr, .momentum = 0.9, .weight_decay = 0}});
    std::vector<Values> expected;
    for (const auto& [name, tensor] : parameters) expected.push_back(values(tensor));
    for (std::uint64_t step = 0; step < 5; ++step) {
      write_gradients(parameters, 10 * step, 100.0);
      for (std::size_t i = 0; i < 3; ++i) {
        Values g = values(parameters[i].tensor.grad());
        for (double& x : g) x *= scale;
        g = larc_gradient(expected[i], g, options, lr, decay);
        adam ? adams[i].update(expected[i], g) : sgds[i].update(expected[i], g);
      }
      EXPECT_TRUE(larc.optimizer().step({.gradient_scale = scale}).applied);
      EXPECT_EQ(optimizer->groups()[0].weight_decay, decay);
    }
    // With remainders the norms are of the bf16 weights.
    const double tolerance = c.masters == MasterStorage::remainder ? 1e-3 : 1e-5;
    for (std::size_t i = 0; i < 3; ++i) {
      test::expect_close(kernels::master_value(parameters[i].tensor), expected[i], tolerance,
                         tolerance, parameters[i].name);
    }
  }
}

std::vector<LarcCase> larc_cases() {
  std::vector<LarcCase> all;
  for (const Device device : test::devices()) {
    for (const bool clip : {true, false}) {
      all.push_back({device, DType::f32, MasterStorage::f32, clip});
      all.push_back({device, DType::f16, MasterStorage::f32, clip});
      all.push_back({device, DType::bf16, MasterStorage::f32, clip});
      all.push_back({device, DType::bf16, MasterStorage::remainder, clip});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, Larc, testing::ValuesIn(larc_cases()));

TEST(Larc, EndsWithTheWrapper) {
  const NamedTensors parameters = {make_parameter("a", {5}, 1)};
  FusedSGD optimizer(parameters, {.lr = 1.0});
  {
    LARC larc(optimizer);
    EXPECT_THROW(LARC second(optimizer), core::InvalidArgument);
    EXPECT_EQ(larc.options().trust_coefficient, 0.02);
    write_gradients(parameters, 1);
    EXPECT_THROW((void)optimizer.update({}, {}), core::InvalidArgument);  // needs norms
    EXPECT_TRUE(larc.step({.check = false}).applied);
  }
  Values expected = values(parameters[0].tensor);
  write_gradient(parameters[0].tensor, Values(5, 0.5));
  test::expect_applied(optimizer.step());
  for (double& w : expected) w -= 0.5;
  test::expect_close(parameters[0].tensor, expected, 1e-6, 1e-6);
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
