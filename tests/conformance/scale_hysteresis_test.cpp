// The moves of a loss scale with hysteresis: 72 cases, all exact.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cairn/kernels/update_scale.h"
#include "support/tensors.h"

namespace cairn::conformance {
namespace {

class ScaleHysteresis : public testing::TestWithParam<Device> {
 protected:
  void start(float scale, const kernels::ScaleUpdateOptions& options) {
    options_ = options;
    expected_ = scale;
    scale_ = Tensor::full({1}, scale, DType::f32, GetParam());
    growth_ = Tensor::zeros({1}, DType::i32, GetParam());
    hysteresis_ = Tensor::full({1}, options.hysteresis, DType::i32, GetParam());
  }
  void step(bool overflow) {
    const Tensor found = Tensor::full({1}, overflow ? 1.0 : 0.0, DType::f32, GetParam());
    kernels::update_scale(scale_, growth_, hysteresis_, found, options_);
  }
  void expect_no_change(int steps, bool overflow) {
    for (int i = 0; i < steps; ++i) {
      step(overflow);
      ASSERT_EQ(scale_.item(), expected_) << "step " << i;
    }
  }
  void expect_backoffs(int steps) {
    for (int i = 0; i < steps; ++i) {
      step(true);
      expected_ *= static_cast<float>(options_.backoff_factor);
      ASSERT_EQ(scale_.item(), expected_) << "step " << i;  // may be 0
    }
  }
  void expect_growth() {
    step(false);
    const float grown = expected_ * static_cast<float>(options_.growth_factor);
    if (std::isfinite(grown)) expected_ = grown;
    ASSERT_EQ(scale_.item(), expected_);
  }

  /// `extra` steps more than the least of each kind.
  void run(int extra) {
    expect_no_change(options_.hysteresis - 1, true);
    expect_no_change(options_.growth_interval - 1, false);
    expect_no_change(options_.hysteresis - 1, true);
    expect_backoffs(1 + extra);
    for (int growths = 1 + extra / options_.growth_interval; growths > 0; --growths) {
      expect_no_change(options_.growth_interval - 1, false);
      expect_growth();
    }
    expect_no_change(extra % options_.growth_interval, false);
  }

  kernels::ScaleUpdateOptions options_;
  float expected_ = 0.0f;
  Tensor scale_, growth_, hysteresis_;
};

TEST_P(ScaleHysteresis, MovesTheScaleExactly) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> any(0, 1000);
  for (float scale : {1.0f, 1024.0f, 65536.0f}) {
    for (double growth : {1.0, 2.0, 4.0}) {
      for (double backoff : {0.5, 0.25}) {
        for (int interval : {10, 100}) {
          for (int hysteresis : {10, 100}) {
            const int extra = any(random);
            SCOPED_TRACE(core::str("scale ", scale, ", growth ", growth, ", backoff ", backoff,
                                   ", interval ", interval, ", hysteresis ", hysteresis, ", extra ",
                                   extra));
            start(scale, {growth, backoff, interval, hysteresis});
            run(extra);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(ScaleHysteresis, NeverGrowsToInfinity) {
  start(65536.0f, {4.0, 0.5, 10, 10});
  run(5);  // backs off 6 times
  for (int i = 0; i < 100; ++i) {
    expect_no_change(i == 0 ? 10 - 5 - 1 : 9, false);
    expect_growth();
  }
  EXPECT_TRUE(std::isfinite(expected_));
  EXPECT_GT(expected_, 1e37f);
}

INSTANTIATE_TEST_SUITE_P(Devices, ScaleHysteresis, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::conformance
