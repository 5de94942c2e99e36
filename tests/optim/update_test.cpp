// The update of every optimizer, dtype and odd size against double precision.
#include "reference.h"
#include "support.h"

namespace cairn::optim {
namespace {

struct UpdateCase {
  Device device;
  DType weight, gradient;
  bool masters;
};

std::string case_name(const testing::TestParamInfo<UpdateCase>& info) {
  const UpdateCase& c = info.param;
  return core::str(c.device.is_cuda() ? "cuda_" : "cpu_", c.weight, "_gradient_", c.gradient,
                   c.masters ? "_masters" : "");
}

std::vector<UpdateCase> update_cases() {
  std::vector<UpdateCase> all;
  for (const Device device : test::devices()) {
    all.push_back({device, DType::f32, DType::f32, true});
    for (const DType half : {DType::f16, DType::bf16}) {
      all.push_back({device, half, half, true});
      all.push_back({device, half, DType::f32, true});
      all.push_back({device, half, half, false});
    }
  }
  return all;
}

const std::vector<Shape> kShapes = {{1}, {}, {3, 7}, {0}, {1023}, {65, 129}};

class Update : public testing::TestWithParam<UpdateCase> {
 protected:
  /// Trains 7 steps with gradients of up to 8 that are multiplied by `scale`; f32 slots where
  /// asked.
  template <class Reference>
  void run(const decltype(Reference::options)& options, double scale) {
    const UpdateCase& c = GetParam();
    NamedTensors parameters;
    for (std::size_t i = 0; i < kShapes.size(); ++i) {
      parameters.push_back(
          make_parameter(core::str("p", i), kShapes[i], i + 1, c.weight, c.device));
    }
    const auto arena = GradientArena::attach(parameters, c.gradient == DType::f32);
    typename Reference::Optimizer optimizer(parameters, options);
    optimizer.set_master_weights(c.masters);

    std::vector<Reference> references(parameters.size(), Reference{options});
    std::vector<Values> expected = values(parameters);
    for (std::uint64_t step = 0; step < 7; ++step) {
      write_gradients(parameters, 100 * step, 8.0);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const Tensor gradient = parameters[i].tensor.grad();
        EXPECT_EQ(gradient.dtype(), c.gradient);
        references[i].update(expected[i], values(gradient), scale);
        if (!c.masters) expected[i] = rounded(expected[i], c.weight);
      }
      expect_applied(optimizer.step({.gradient_scale = scale}));
    }
    for (std::size_t i = 0; i < expected.size(); ++i) check(parameters[i].tensor, expected[i]);
  }

  void check(const Tensor& parameter, const Values& expected) {
    const UpdateCase& c = GetParam();
    if (c.weight == DType::f32) return test::expect_close(parameter, expected, 4e-6, 2e-6);
    if (!c.masters) {
      EXPECT_FALSE(kernels::MasterWeight::exists(parameter));
      // A near tie that rounds the other way once, at weights up to 1.
      const double rounding = test::epsilon(c.weight);
      return test::expect_close(parameter, expected, 2 * rounding, rounding);
    }
    ASSERT_TRUE(kernels::MasterWeight::exists(parameter));
    const Tensor& master = kernels::MasterWeight::of(parameter)->tensor();
    EXPECT_EQ(master.dtype(), DType::f32);
    test::expect_close(master, expected, 4e-6, 2e-6);
    EXPECT_EQ(values(parameter), rounded(values(master), c.weight));
  }
};

TEST_P(Update, AdamW) {
  run<reference::Adam>({.lr = 1e-2, .weight_decay = 0.1}, 1.0);
}
TEST_P(Update, AdamWithL2AndScale) {
  run<reference::Adam>(
      {.lr = 1e-2, .beta1 = 0.6, .beta2 = 0.9, .eps = 3e-6, .weight_decay = 0.01, .adamw = false},
      1.0 / 1024);
}
TEST_P(Update, AdamWithoutBiasCorrection) {
  run<reference::Adam>({.lr = 1e-3, .bias_correction = false}, 1.0);
}
TEST_P(Update, PlainSgd) {
  run<reference::Sgd>({.lr = 0.05, .weight_decay = 0.1}, 0.25);
}
TEST_P(Update, SgdWithMomentumAndLateDecay) {
  run<reference::Sgd>({.lr = 0.02,
                       .momentum = 0.9,
                       .dampening = 0.5,
                       .weight_decay = 0.1,
                       .wd_after_momentum = true},
                      0.25);
}
TEST_P(Update, SgdNesterov) {
  run<reference::Sgd>({.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}, 1.0);
}
TEST_P(Update, Adagrad) {
  run<reference::Adagrad>({.weight_decay = 0.01}, 1.0 / 64);
}
TEST_P(Update, AdagradWithDecoupledAndLearningRateDecay) {
  run<reference::Adagrad>({.lr = 0.02,
                           .weight_decay = 0.1,
                           .adagrad_w = true,
                           .lr_decay = 0.3,
                           .initial_accumulator = 0.5},
                          1.0);
}
TEST_P(Update, RmsProp) {
  run<reference::RmsProp>({.weight_decay = 0.01}, 1.0 / 64);
}
TEST_P(Update, RmsPropWithMomentum) {
  run<reference::RmsProp>(
      {.lr = 0.02, .alpha = 0.9, .eps = 1e-4, .momentum = 0.8, .weight_decay = 0.1}, 1.0);
}
TEST_P(Update, NovoGrad) {
  run<reference::NovoGrad>({.lr = 1e-2, .beta1 = 0.95, .beta2 = 0.98, .weight_decay = 0.1},
                           1.0 / 64);
}
TEST_P(Update, NovoGradOfTheLargestElementFromZero) {
  run<reference::NovoGrad>(
      {.lr = 1e-2, .beta2 = 0.5, .grad_averaging = false, .norm_type = INFINITY, .init_zero = true},
      1.0);
}
TEST_P(Update, NovoGradWithDecayInsideTheMoment) {
  run<reference::NovoGrad>({.lr = 1e-2,
                            .beta1 = 0.95,
                            .beta2 = 0.0,
                            .weight_decay = 0.01,
                            .bias_correction = false,
                            .reg_inside_moment = true},
                           1.0);
}
TEST_P(Update, Lamb) {
  run<reference::Lamb>({.lr = 1e-2, .weight_decay = 0.1, .max_gradient_norm = 0.0}, 1.0 / 64);
}
TEST_P(Update, LambWithL2AndWithoutAveraging) {
  run<reference::Lamb>({.lr = 1e-2,
                        .beta1 = 0.5,
                        .beta2 = 0.9,
                        .weight_decay = 0.01,
                        .bias_correction = false,
                        .adamw = false,
                        .grad_averaging = false,
                        .max_gradient_norm = 0.0},
                       1.0);
}
TEST_P(Update, LambWithoutDecay) {
  run<reference::Lamb>({.lr = 1e-3, .weight_decay = 0.0, .max_gradient_norm = 0.0}, 1.0);
  run<reference::Lamb>(
      {.lr = 1e-3, .weight_decay = 0.0, .max_gradient_norm = 0.0, .use_nvlamb = true}, 1.0);
}

INSTANTIATE_TEST_SUITE_P(Cases, Update, testing::ValuesIn(update_cases()), case_name);

TEST(LambClipping, ByTheUnscaledNormOfAllGroups) {
  for (const double step_bound : {0.0, 3.0}) {
    const NamedTensors parameters = {make_parameter("a", {40}, 1), make_parameter("b", {9}, 2)};
    const LambOptions options{.lr = 0.1, .max_gradient_norm = 2.0};
    FusedLAMB optimizer({{{parameters[0]}, 0.1, 0.01}, {{parameters[1]}, 0.1, 0.01}}, options);
    std::vector<reference::Lamb> references(2, {options});
    std::vector<Values> expected = values(parameters);
    for (std::uint64_t step = 0; step < 4; ++step) {
      write_gradients(parameters, 50 * step, step == 3 ? 1.0 : 1000.0);
      const std::vector<Values> gradients = gradients_of(parameters);
      const double norm = test::norm_of(test::joined(gradients)) / 256;
      for (std::size_t i = 0; i < 2; ++i) {
        references[i].update(expected[i], gradients[i], 1.0 / 256, norm);
      }
      const StepResult result =
          optimizer.step({.gradient_scale = 1.0 / 256, .max_gradient_norm = step_bound});
      EXPECT_NEAR(result.gradient_norm, norm, 1e-5 * norm);
      EXPECT_NEAR(result.clip_coefficient, norm > 2 ? 2 / norm : 1.0, 1e-6);
    }
    expect_weights(parameters, expected, 1e-5, 1e-5);
  }
}

TEST(LambClipping, AfterEachGroupIsClippedByItsOwnNorm) {
  const LambOptions options{.lr = 0.1, .max_gradient_norm = 0.5};
  for (const bool by_hand : {false, true}) {
    const NamedTensors both = {make_parameter("a", {4}, 1), make_parameter("b", {9}, 2)};
    FusedLAMB optimizer({{{both[0]}, 0.1, 0.01}, {{both[1]}, 0.1, 0.01}}, options);
    // Norms 8 and 6: each is clipped to 1, both together have the norm of root 2.
    write_gradient(both[0].tensor, Values(4, by_hand ? 0.5 : 4.0));
    write_gradient(both[1].tensor, Values(9, by_hand ? 1.0 / 3 : 2.0));
    const StepResult result =
        by_hand ? optimizer.step()
                : optimizer.step({.max_gradient_norm = 1.0, .per_group_norm = true});
    const double expected = 0.5 / std::sqrt(2.0) / (by_hand ? 1.0 : 8.0);
    EXPECT_NEAR(result.clip_coefficient, expected, 1e-6);
    const Values moment(4, 0.1 * 0.5 * 0.5 / std::sqrt(2.0));
    test::expect_close(moment_of(optimizer, "a"), moment, 1e-5, 1e-6);
  }
}

TEST(UpdateLayout, ChannelsLastWeightsWithForeignGradientLayouts) {
  const Shape shape{4, 3, 5, 5};
  const Values start = test::random_values(300, 1), gradient = test::random_values(300, 2);
  Tensor weight = Tensor::empty_strided(shape, core::channels_last_strides(shape), DType::f32,
                                        core::default_device());
  kernels::copy(Tensor::from(start, shape, DType::f32), weight);
  const Tensor contiguous = Tensor::from(gradient, shape, DType::f32);
  FusedAdam optimizer({wrap_parameter("w", weight, contiguous)}, {.lr = 0.1});
  reference::Adam reference{{.lr = 0.1}};
  Values expected = values(Tensor::from(start, shape, DType::f32));
  for (int i = 0; i < 3; ++i) {
    expect_applied(optimizer.step({.keep_gradients = true}));
    reference.update(expected, values(contiguous));
  }
  test::expect_close(weight, expected, 4e-6, 2e-6);
}

}  // namespace
}  // namespace cairn::optim
