#include "support/throughput.h"

#include <gtest/gtest.h>

namespace support {
namespace {

using std::chrono::milliseconds;

TEST(Throughput, IsThatOfTheLastSteps) {
  Throughput::Clock::time_point now;
  Throughput rate(now);
  const auto steps = [&](int count, int each) {
    for (int i = 0; i < count; ++i) rate.step(100, now += milliseconds(each));
  };
  EXPECT_EQ(rate.per_second(), 0);
  steps(1, 2000);
  EXPECT_DOUBLE_EQ(rate.per_second(), 50);
  steps(1, 100);  // the first is forgotten
  EXPECT_DOUBLE_EQ(rate.per_second(), 1000);
  steps(9, 100);
  EXPECT_DOUBLE_EQ(rate.per_second(), 1000);
  steps(25, 300);
  EXPECT_NEAR(rate.per_second(), 3500 / 8.5, 1e-9);
  steps(50, 50);
  EXPECT_DOUBLE_EQ(rate.per_second(), 2000);
}

}  // namespace
}  // namespace support
