#include "support/reporter.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace support {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A run whose loss became NaN goes on: it keeps the lines up to its step, and draws what it can.
TEST(Reporter, ResumesARunWithALossOfNaN) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("cairn-metrics-" + std::to_string(getpid())))
          .string();
  const double losses[] = {2.0, std::nan(""), std::numeric_limits<double>::infinity(), 1.0};
  Reporter::Options options{.metrics_path = path, .total_steps = 5};
  {
    Reporter reporter(options);
    for (int step = 1; step <= 4; ++step) {
      reporter.micro_batch(losses[step - 1]);
      reporter.step({.step = step});
    }
  }
  options.first_step = 3;
  {
    Reporter resumed(options);
    resumed.micro_batch(0.5);
    resumed.step({.step = 4});
    ASSERT_EQ(resumed.losses().size(), 4u);
    EXPECT_EQ(resumed.losses()[0], 2.0);
    EXPECT_TRUE(std::isnan(resumed.losses()[1]));
    EXPECT_EQ(resumed.losses()[3], 0.5);
  }
  const std::string text = read(path);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace support
