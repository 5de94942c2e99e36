// FusedNovoGrad against double precision; lr 1e-3, betas (.95, 0), no bias correction,
// weight decay inside the moment, 2-norms.
#include "cairn/optim/novograd.h"
#include "many_elements.h"

namespace cairn::conformance {
namespace {

using optim::FusedNovoGrad;
using optim::NovoGradOptions;

void check(const std::vector<Shape>& shapes, DType dtype, bool grad_averaging, Device device) {
  const NovoGradOptions o{.lr = 1e-3,
                          .beta1 = 0.95,
                          .beta2 = 0.0,
                          .bias_correction = false,
                          .reg_inside_moment = true,
                          .grad_averaging = grad_averaging};
  const ManyElements all(shapes, dtype, device);
  FusedNovoGrad optimizer(all.parameters(), o);
  all.train(optimizer, kIterations);
  std::vector<std::vector<double>> norms(shapes.size());
  for (std::size_t t = 0; t < shapes.size(); ++t) {
    for (int k = 0; k < kIterations; ++k) norms[t].push_back(all.norm(t, k));  // beta2 is 0
  }
  const double b3 = grad_averaging ? 1 - o.beta1 : 1.0;
  expect_fused(all.compare(
      [&](std::size_t t, std::int64_t i) {
        double w = all.weight(t, i), m = 0.0;
        for (int k = 0; k < kIterations; ++k) {
          const double n = norms[t][static_cast<std::size_t>(k)];
          m = o.beta1 * m + b3 * all.gradient(t, i, k) / (n + o.eps);
          w -= o.lr * m;
        }
        return w;
      },
      dtype));
}

using NovogradAxes = std::tuple<Device, bool>;
class NovoGrad : public testing::TestWithParam<NovogradAxes> {};
INSTANTIATE_TEST_SUITE_P(NovogradAxes, NovoGrad,
                         testing::Combine(testing::ValuesIn(test::devices()), testing::Bool()),
                         [](const auto& info) {
                           return core::str(std::get<0>(info.param).is_cuda() ? "cuda" : "cpu",
                                            std::get<1>(info.param) ? "_averaging" : "");
                         });

TEST_P(NovoGrad, Float) {
  check({{kElements}}, DType::f32, std::get<1>(GetParam()), std::get<0>(GetParam()));
}
TEST_P(NovoGrad, Half) {
  check({{kElements}}, DType::f16, std::get<1>(GetParam()), std::get<0>(GetParam()));
}
TEST(NovoGradSizes, ManyParameters) {
  for (const Device device : test::fast_devices()) check(kManySizes, DType::f32, false, device);
}

}  // namespace
}  // namespace cairn::conformance
