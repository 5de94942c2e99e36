// FusedLAMB against a LAMB in double precision, at 18011 elements, and at Apex's list of
// sizes; with half parameters, as FusedMixedPrecisionLamb.
#include "cairn/optim/lamb.h"

#include "many_elements.h"

namespace cairn::conformance {
namespace {

using optim::FusedLAMB;
using optim::LambOptions;

/// The reference LAMB's weights of one tensor after `steps`; clip[k]: what divides the gradients.
std::vector<double> lamb(const ManyElements& all, const LambOptions& o, std::size_t t, int steps,
                         const std::vector<double>& clip, double scale) {
  const std::int64_t n = all.parameters()[t].tensor.numel();
  std::vector<double> w(static_cast<std::size_t>(n)), m(w.size(), 0.0), v(w.size(), 0.0);
  for (std::int64_t i = 0; i < n; ++i) w[static_cast<std::size_t>(i)] = all.weight(t, i);
  for (int k = 0; k < steps; ++k) {
    const double c1 = 1 - std::pow(o.beta1, k + 1), c2 = 1 - std::pow(o.beta2, k + 1);
    const double factor = scale / clip[static_cast<std::size_t>(k)];
    const auto update_of = [&](std::size_t i) {
      return (m[i] / c1) / (std::sqrt(v[i] / c2) + o.eps) + o.weight_decay * w[i];
    };
    const double w_norm = std::sqrt(ManyElements::sum(n, [&](std::int64_t at) {
      const auto i = static_cast<std::size_t>(at);
      const double g = all.gradient(t, at, k) * factor;
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      return w[i] * w[i];
    }));
    const double u_norm = std::sqrt(ManyElements::sum(n, [&](std::int64_t at) {
      const double u = update_of(static_cast<std::size_t>(at));
      return u * u;
    }));
    const bool adapts = (o.weight_decay != 0 || o.use_nvlamb) && w_norm > 0 && u_norm > 0;
    const double ratio = adapts ? w_norm / u_norm : 1.0;
    core::parallel_for(n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
        w[i] -= o.lr * ratio * update_of(i);
      }
    });
  }
  return w;
}

/// Trains and compares with torch.testing.assert_close's tolerance of the dtype.
void check(const std::vector<Shape>& shapes, const LambOptions& options, DType dtype, int steps,
           Device device, double loss_scale = 1.0) {
  const ManyElements all(shapes, dtype, device);
  std::vector<double> clip;
  for (int k = 0; k < steps; ++k) {
    clip.push_back(std::max(1.0, all.norm(k) / loss_scale / options.max_gradient_norm));
  }
  FusedLAMB optimizer(all.parameters(), options);
  all.train(optimizer, steps, 1.0 / loss_scale);
  for (std::size_t t = 0; t < shapes.size(); ++t) {
    const std::vector<double> expected = lamb(all, options, t, steps, clip, 1.0 / loss_scale);
    const Differences differences = all.compare_tensor(
        t, [&](std::int64_t i) { return expected[static_cast<std::size_t>(i)]; }, dtype);
    EXPECT_EQ(differences.not_close, 0) << "tensor " << t << ", at most " << differences.most;
  }
}

LambOptions options_of(double weight_decay, bool nvlamb) {
  return {.lr = 5e-4, .eps = 1e-8, .weight_decay = weight_decay, .use_nvlamb = nvlamb};
}

using Axes = std::tuple<Device, double, bool>;
class Lamb : public testing::TestWithParam<Axes> {};
INSTANTIATE_TEST_SUITE_P(Axes, Lamb,
                         testing::Combine(testing::ValuesIn(test::devices()),
                                          testing::Values(0.0, 0.01), testing::Bool()),
                         [](const auto& info) {
                           return core::str(std::get<0>(info.param).is_cuda() ? "cuda" : "cpu",
                                            std::get<1>(info.param) > 0 ? "_decay" : "_no_decay",
                                            std::get<2>(info.param) ? "_nvlamb" : "");
                         });

TEST_P(Lamb, Float) {
  const auto& [device, decay, nvlamb] = GetParam();
  check({{18011}}, options_of(decay, nvlamb), DType::f32, 7, device);
}

TEST_P(Lamb, Option) {
  const auto& [device, decay, nvlamb] = GetParam();
  LambOptions options = options_of(decay, nvlamb);
  options.lr = 0.01, options.beta1 = 0.6, options.beta2 = 0.9, options.eps = 3e-6;
  check({{1}}, options, DType::f32, 7, device);
}

TEST_P(Lamb, MixedPrecision) {
  const auto& [device, decay, nvlamb] = GetParam();
  const LambOptions options = options_of(decay, nvlamb);
  check({{18011}}, options, DType::f32, 7, device, 4.0);
  check({{18011}}, options, DType::bf16, 4, device, 4.0);
  check({{18011}}, options, DType::f16, 1, device, 4.0);
}

TEST(LambSizes, ManyParameters) {
  for (const Device device : test::fast_devices()) {
    check(kManySizes, options_of(0.01, false), DType::f32, 7, device);
  }
}

}  // namespace
}  // namespace cairn::conformance
