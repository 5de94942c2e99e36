// Histograms of weights and gradients, and how near gradients are to their dtype's limit: against
// what is counted here, one value after another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cairn/core/gradient_slot.h"
#include "cairn/core/tensor.h"
#include "cairn/observe/run.h"
#include "observe/owners_readers.h"
#include "observe/run_files.h"
#include "support/expect_error.h"

namespace cairn::observe {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::vector<float> drawn(std::size_t count, unsigned seed) {
  std::mt19937 draw(seed);
  std::normal_distribution<float> normal(0.01F, 0.3F);
  std::vector<float> values(count);
  for (float& value : values) value = normal(draw);
  values[0] = 0, values[1] = -1, values[2] = 0.5F, values[3] = -0.F, values[4] = 1e-40F;
  return values;
}

/// A parameter with a gradient that a loss scale has multiplied.
NamedTensor parameter(const std::string& name, const std::vector<float>& weights,
                      const std::vector<float>& scaled, DType dtype, double scale) {
  const auto n = static_cast<std::int64_t>(weights.size());
  const Tensor weight = Tensor::from(weights, {n}, DType::f32, Device{});
  weight.gradient_slot().set_own(Tensor::from(scaled, {n}, dtype, Device{}));
  weight.gradient_slot().set_scale({.scaler = 1, .factor = scale});
  return {name, weight};
}

json layer_of(const std::filesystem::path& run, const std::string& name) {
  const json data = test::page_data(run);
  for (const json& layer : data["layers"]) {
    if (layer["name"] == name) return layer;
  }
  return nullptr;
}

/// Of each bucket as many as lie there, by the naive way; what lies on a limit is in either.
void expect_counts(const json& read, const std::vector<double>& values) {
  EXPECT_EQ(read["num"], values.size());
  EXPECT_DOUBLE_EQ(read["min"], *std::min_element(values.begin(), values.end()));
  EXPECT_DOUBLE_EQ(read["max"], *std::max_element(values.begin(), values.end()));
  double sum = 0, squares = 0;
  for (const double value : values) sum += value, squares += value * value;
  EXPECT_NEAR(read["sum"], sum, 1e-9 * static_cast<double>(values.size()));
  EXPECT_NEAR(read["sum_squares"], squares, 1e-9 * static_cast<double>(values.size()));
  const json &limits = read["bucket_limit"], &counts = read["bucket"];
  ASSERT_EQ(limits.size(), counts.size());
  double all = counts[0];
  EXPECT_EQ(all, 0);
  for (std::size_t i = 1; i < limits.size(); ++i) {
    const double low = limits[i - 1], high = limits[i];
    ASSERT_LT(low, high);
    double within = 0, at_ends = 0;
    for (const double value : values) {
      within += value > low && value < high;
      at_ends += value == low || value == high;
    }
    EXPECT_GE(counts[i], within) << low << " to " << high;
    EXPECT_LE(counts[i], within + at_ends) << low << " to " << high;
    const bool narrow = counts[i] == 0 || low < 1e-30 || high <= 1.13 * low;
    EXPECT_TRUE(narrow || low < 0) << low << " to " << high;
    all += counts[i].get<double>();
  }
  EXPECT_EQ(all, static_cast<double>(values.size()));
}

TEST(Histograms, TensorBoardReadsWhatIsThere) {
  if (!test::readers_are_here())
    GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  const std::vector<float> weights = drawn(5000, 1);
  std::vector<float> scaled = drawn(5000, 2);
  for (float& value : scaled) value *= 1024;
  {
    observe::Run run(folder.string(), {.histogram_every = 2});
    const NamedTensor fc = parameter("fc.weight", weights, scaled, DType::f32, 1024);
    for (int step = 1; step <= 5; ++step) {
      run.histograms(std::span(&fc, 1));
      run.step({{"loss", 1}});
    }
  }
  const json read = test::read_by_owners(folder.string())["tensorboard"]["histograms"];
  ASSERT_EQ(read.size(), 2u) << read;
  for (const char* kind : {"weights/fc.weight", "gradients/fc.weight"}) {
    ASSERT_EQ(read[kind].size(), 2u) << kind;
    EXPECT_EQ(read[kind][0][0], 2);
    EXPECT_EQ(read[kind][1][0], 4);
  }
  expect_counts(read["weights/fc.weight"][1][1], {weights.begin(), weights.end()});
  std::vector<double> unscaled;
  for (const float value : scaled) unscaled.push_back(value / 1024.0);
  expect_counts(read["gradients/fc.weight"][1][1], unscaled);
}

TEST(Histograms, ThePageSaysHowFarTheLargestGradientIsFromItsLimit) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.histogram_every = 1});
    const auto tell = [&](float largest_half, float largest_bf16) {
      const NamedTensor all[] = {
          parameter("half", {1, 2}, {-largest_half, 1}, DType::f16, 512),
          parameter("bf16", {1, 2}, {1, largest_bf16}, DType::bf16, 1),
          {"frozen", Tensor::from(std::vector<float>{4, 0}, {2}, DType::f32, Device{})}};
      run.histograms(all);
      run.step({});
    };
    tell(1024, 1);
    tell(32768, 4);
    tell(INFINITY, 2);
    run.event(EventKind::overflow, "inf in the gradient of half", "half");
    tell(8192, 2);
  }
  const json half = layer_of(folder.string(), "half");
  EXPECT_EQ(half["dtype"], "f16");
  EXPECT_NEAR(half["bits"], std::log2(65504.0 / 8192), 1e-9);
  EXPECT_EQ(half["least_bits"], -1) << "it overflowed";
  EXPECT_EQ(half["least_step"], 3);
  EXPECT_EQ(half["largest"], 16) << "without its scale";
  EXPECT_EQ(half["gradients"], (json{-9, {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}}));
  EXPECT_EQ(half["weights"], (json{0, {1, 1}}));
  const json bf16 = layer_of(folder.string(), "bf16");
  EXPECT_NEAR(bf16["bits"], 127 - 1 + std::log2(2 - 0x1p-7), 1e-9);
  EXPECT_EQ(bf16["least_step"], 2);
  EXPECT_EQ(layer_of(folder.string(), "frozen")["seen"], false);
}

TEST(Histograms, NothingIsMeasuredUnlessItIsAsked) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    const NamedTensor undefined{"not read", Tensor()};
    for (int step = 1; step <= 3; ++step) {
      run.histograms(std::span(&undefined, 1));
      run.step({});
    }
  }
  EXPECT_EQ(test::page_data(folder.string())["layers"], json::array());
  for (const auto& file : test::event_files(folder.string()))
    EXPECT_EQ(test::text_of(file).find("weights/"), std::string::npos);
  test::expect_error<core::InvalidArgument>(
      [&] { observe::Run run(folder.string(), {.histogram_every = -1}); }, {"histogram_every"});
}

}  // namespace
}  // namespace cairn::observe
