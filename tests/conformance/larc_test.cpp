// LARC through amp at every opt level; Apex looked only whether it runs.
#include "cairn/optim/larc.h"
#include "cairn/optim/optimizer_access.h"
#include "cairn/optim/sgd.h"

#include "multi_model.h"

namespace cairn::conformance {
namespace {

class LarcAtEveryLevel : public testing::TestWithParam<amp::OptLevel> {};

TEST_P(LarcAtEveryLevel, TrainsAsTheFormulaSays) {
  constexpr double kLr = 0.25, kMomentum = 0.125, kTrust = 0.02, kEps = 1e-8;
  MyModel model(1.0);
  optim::FusedSGD optimizer(model.parameters(), {.lr = kLr, .momentum = kMomentum});
  const optim::LARC larc(optimizer);
  amp::Options options{.opt_level = GetParam()};
  if (GetParam() != amp::OptLevel::O1) options.cast_model_type = DType::f32;
  options.loss_scale = 128.0;
  amp::Amp precision = amp::initialize(model, optimizer, options);
  model.halve();
  optimizer.set_master_weights(GetParam() == amp::OptLevel::O2);
  optim::OptimizerAccess(optimizer).refresh();

  std::array<Vec, 2> w{Vec{1, 2}, Vec{2, 3}}, buffer{};
  for (int step = 0; step < 5; ++step) {
    const std::int64_t reads = kernels::host_reads();
    precision.backward(model(Tensor::full({2}, 1.0)));
    EXPECT_TRUE(precision.step().applied);
    EXPECT_EQ(kernels::host_reads(), reads + 1);
    const std::array<Vec, 2> before = w;
    for (std::size_t p = 0; p < 2; ++p) {
      const Vec& g = before[1 - p];
      const double w_norm = std::hypot(before[p][0], before[p][1]), g_norm = std::hypot(g[0], g[1]);
      const double a = std::min(kTrust * w_norm / (g_norm + kEps) / kLr, 1.0);
      for (std::size_t k = 0; k < 2; ++k) {
        buffer[p][k] = step == 0 ? a * g[k] : kMomentum * buffer[p][k] + a * g[k];
        w[p][k] -= kLr * buffer[p][k];
      }
    }
    // Without masters the half weight is rounded in each step.
    expect_close(model.w0().to_vector<double>(), w[0], DType::f16);
    const std::vector<double> half = model.w1().to_vector<double>();
    for (std::size_t k = 0; k < 2; ++k) EXPECT_NEAR(half[k], w[1][k], 4e-3);
  }
}
INSTANTIATE_TEST_SUITE_P(Levels, LarcAtEveryLevel,
                         testing::Values(amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2,
                                         amp::OptLevel::O3),
                         [](const auto& info) { return std::string(amp::name(info.param)); });

}  // namespace
}  // namespace cairn::conformance
