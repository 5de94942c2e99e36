#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "cairn/kernels/update_scale.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;

class UpdateScale : public testing::TestWithParam<Device> {
 protected:
  struct State {
    Tensor scale, growth, hysteresis;
  };
  State state(double scale, std::int32_t growth, std::int32_t hysteresis) const {
    return {Tensor::full({1}, scale, DType::f32, GetParam()),
            Tensor::full({1}, growth, DType::i32, GetParam()),
            Tensor::full({1}, hysteresis, DType::i32, GetParam())};
  }
  void step(const State& s, bool overflow, const ScaleUpdateOptions& options) const {
    const Tensor found = Tensor::full({1}, overflow ? 1.0 : 0.0, DType::f32, GetParam());
    update_scale(s.scale, s.growth, s.hysteresis, found, options);
  }
  static void expect(const State& s, double scale, int growth, int hysteresis) {
    EXPECT_EQ(s.scale.item(), scale);
    EXPECT_EQ(s.growth.item(), growth);
    EXPECT_EQ(s.hysteresis.item(), hysteresis);
  }
};

TEST_P(UpdateScale, BacksOffOnceTheHysteresisIsUsedUp) {
  const ScaleUpdateOptions options{2.0, 0.25, 10, 3};
  const State s = state(1024, 5, 3);
  step(s, true, options);
  expect(s, 1024, 0, 2);
  step(s, true, options);
  expect(s, 1024, 0, 1);
  step(s, true, options);
  expect(s, 256, 0, 0);
  step(s, true, options);  // and with every further overflow
  expect(s, 64, 0, 0);
  step(s, false, options);
  expect(s, 64, 1, 3);
  step(s, true, options);
  expect(s, 64, 0, 2);
}

TEST_P(UpdateScale, GrowsAfterTheInterval) {
  const ScaleUpdateOptions options{4.0, 0.5, 3, 1};
  const State s = state(1, 0, 1);
  for (int i = 1; i <= 2; ++i) {
    step(s, false, options);
    expect(s, 1, i, 1);
  }
  step(s, false, options);
  expect(s, 4, 0, 1);
  step(s, true, options);
  expect(s, 2, 0, 0);
}

TEST_P(UpdateScale, StaysWithinItsBoundsAndCountsOverflowsAtTheLowerOne) {
  const ScaleUpdateOptions options{.growth_interval = 1, .min_scale = 4, .max_scale = 16};
  const State s = state(8, 0, 1);
  const Tensor overflows = Tensor::zeros({2}, DType::i32, GetParam());
  const auto after = [&](bool overflow) {
    const Tensor found = Tensor::full({1}, overflow ? 1.0 : 0.0, DType::f32, GetParam());
    update_scale(s.scale, s.growth, s.hysteresis, found, options, overflows);
    std::vector<double> all = overflows.to_vector<double>();
    all.push_back(s.scale.item());
    return all;
  };
  using Numbers = std::vector<double>;
  EXPECT_EQ(after(true), (Numbers{1, 0, 4}));
  EXPECT_EQ(after(true), (Numbers{2, 1, 4}));
  EXPECT_EQ(after(true), (Numbers{3, 2, 4}));
  EXPECT_EQ(after(false), (Numbers{3, 0, 8}));
  EXPECT_EQ(after(false), (Numbers{3, 0, 16}));
  EXPECT_EQ(after(false), (Numbers{3, 0, 16}));
}

TEST_P(UpdateScale, AHysteresisThatIsNotConsecutiveStartsAnewWithGrowth) {
  const ScaleUpdateOptions options{
      .growth_interval = 2, .hysteresis = 3, .consecutive_hysteresis = false};
  const State s = state(8, 0, 3);
  step(s, true, options);
  step(s, false, options);
  expect(s, 8, 1, 2);
  step(s, true, options);
  expect(s, 8, 0, 1);
  step(s, false, options);
  step(s, false, options);
  expect(s, 16, 0, 3);
}

TEST_P(UpdateScale, DoesNotGrowToInfinity) {
  const State s = state(0x1p127, 0, 1);
  step(s, false, {2.0, 0.5, 1, 1});
  expect(s, 0x1p127, 0, 1);
}

TEST_P(UpdateScale, ErrorsNameTheView) {
  const State s = state(1, 0, 1);
  const Tensor found = Tensor::zeros({1}, DType::f32, GetParam());
  EXPECT_THAT(message_of([&] { update_scale(s.scale, s.scale, s.hysteresis, found); }),
              testing::HasSubstr("[update_scale] expected growth_tracker of dtype i32, got f32"));
  const Tensor two = Tensor::zeros({2}, DType::f32, GetParam());
  EXPECT_THAT(message_of([&] { update_scale(s.scale, s.growth, s.hysteresis, two); }),
              testing::HasSubstr("expected found_inf of one element, got shape [2]"));
  for (const ScaleUpdateOptions& bad :
       {ScaleUpdateOptions{0.5, 0.5, 1, 1}, ScaleUpdateOptions{2, 0, 1, 1},
        ScaleUpdateOptions{2, 1.5, 1, 1}, ScaleUpdateOptions{2, 0.5, 0, 1},
        ScaleUpdateOptions{2, 0.5, 1, 0}}) {
    EXPECT_THROW(update_scale(s.scale, s.growth, s.hysteresis, found, bad), core::InvalidArgument);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, UpdateScale, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
