// The files as their owners' readers read them: TensorBoard's and Prometheus'.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/observe/run.h"
#include "observe/owners_readers.h"
#include "observe/run_files.h"

namespace cairn::observe {
namespace {

using nlohmann::json;
using test::read_by_owners;
using test::readers_are_here;
using testing::HasSubstr;

const char* const kOdd = "a \"b\"\\,\nc";

void tell_training(const std::string& folder, std::int64_t first, std::int64_t last) {
  observe::Run run(folder, {.first_step = first, .about = {{"opt level", "O2"}}});
  for (std::int64_t step = first + 1; step <= last; ++step) {
    { const Span span(run, "forward"); }
    const double loss = step == 4 ? std::nan("") : 1.0 / static_cast<double>(step);
    run.step({{"loss", loss}, {kOdd, step}});
  }
  run.event(EventKind::skip, "inf in the gradient of fc.weight", "fc.weight");
  run.text("precision", "matmul  f16\nnorm    f32");
  run.event(EventKind::checkpoint, "saved");
  run.summary({{"best", std::numeric_limits<double>::infinity()}});
}

TEST(OwnersReaders, TensorBoardHasEveryValue) {
  if (!readers_are_here()) GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  tell_training(folder.string(), 0, 50);
  const json read = read_by_owners(folder.string())["tensorboard"];
  const json loss = read["scalars"]["loss"];
  ASSERT_EQ(loss.size(), 50u);
  for (std::size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(loss[i][0], i + 1);
    const double expected = static_cast<float>(1.0 / static_cast<double>(i + 1));
    if (i + 1 == 4)
      EXPECT_TRUE(loss[i][1].is_null());
    else
      EXPECT_EQ(loss[i][1], expected);
  }
  EXPECT_EQ(read["scalars"][kOdd][6], (json{7, 7.0}));
  EXPECT_EQ(read["scalars"]["seconds/forward"].size(), 50u);
  EXPECT_EQ(read["texts"]["precision"][0], (json{50, "    matmul  f16\n    norm    f32"}));
  EXPECT_THAT(read["texts"]["events/skip"][0][1].get<std::string>(), HasSubstr("fc.weight"));
  EXPECT_EQ(read["texts"]["events/skip"][0][0], 51);
  EXPECT_THAT(read["texts"]["about"][0][1].get<std::string>(), HasSubstr("opt level: O2"));
}

TEST(OwnersReaders, TensorBoardHasHyperparameters) {
  if (!readers_are_here()) GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  { const observe::Run run(folder.string(), {.about = {{"level", "O2"}, {"lr", "1e-3"}}}); }
  EXPECT_EQ(read_by_owners(folder.string())["tensorboard"]["hyperparameters"],
            (json{{"level", "O2"}, {"lr", 1e-3}}));
}

/// As TensorBoard, which decodes with Pillow, has the pixels.
TEST(OwnersReaders, TensorBoardHasPictures) {
  if (!readers_are_here()) GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  const std::vector<double> grey{0, 0.5, 1, -1, 2, std::nan("")};
  {
    observe::Run run(folder.string());
    run.step({{"loss", 1}});
    run.image("grey", Tensor::from(grey, {2, 3}, DType::f16));
    run.step({{"loss", 1}});
    run.image("colours", Tensor::from<double>({1, 2, 3, 4, 5, 6}, {3, 1, 2}, DType::u8));
    run.image("three", Tensor::from<double>({7, 8, 9}, {3, 1, 1, 1}, DType::u8));
  }
  const json read = read_by_owners(folder.string())["tensorboard"]["images"];
  const auto repeated = [](const std::vector<int>& levels) {
    std::vector<int> rgb;
    for (const int level : levels) rgb.insert(rgb.end(), 3, level);
    return rgb;
  };
  EXPECT_EQ(read["grey"][0], (json{1, repeated({0, 128, 255, 0, 255, 0}), 2, 3}));
  EXPECT_EQ(read["colours"][0], (json{2, {1, 3, 5, 2, 4, 6}, 1, 2}));
  EXPECT_EQ(read["three"][0], (json{2, repeated({7, 8, 9, 0}), 2, 2}));  // two in a row
}

// Of the steps after the checkpoint those of the second process alone.
TEST(OwnersReaders, TensorBoardForgetsWhatCameAfterACheckpoint) {
  if (!readers_are_here()) GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  tell_training(folder.string(), 0, 20);
  tell_training(folder.string(), 10, 12);
  const json loss = read_by_owners(folder.string())["tensorboard"]["scalars"]["loss"];
  ASSERT_EQ(loss.size(), 12u);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(loss[i][0], i + 1);
}

TEST(OwnersReaders, PrometheusHasTheLastValues) {
  if (!readers_are_here()) GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  tell_training(folder.string(), 0, 50);
  const json samples = read_by_owners(folder.string())["openmetrics"];
  const auto value = [&](const std::string& name, const json& labels) {
    for (const json& sample : samples) {
      if (sample[0] == name && sample[1] == labels) return sample[2];
    }
    ADD_FAILURE() << "no " << name << labels << " in " << samples;
    return json();
  };
  EXPECT_EQ(value("cairn_step", {{"rank", "0"}}), 50);
  EXPECT_EQ(value("cairn_running", {{"rank", "0"}}), 0);
  EXPECT_EQ(value("cairn_value", {{"rank", "0"}, {"name", "loss"}}), 1.0 / 50);
  EXPECT_EQ(value("cairn_value", {{"rank", "0"}, {"name", kOdd}}), 50);
  EXPECT_EQ(value("cairn_events_total", {{"rank", "0"}, {"kind", "skip"}}), 1);
  EXPECT_EQ(value("cairn_events_total", {{"rank", "0"}, {"kind", "restart"}}), 0);
  EXPECT_EQ(value("cairn_summary", {{"rank", "0"}, {"name", "best"}}), "inf");
  EXPECT_EQ(value("cairn_dropped_records_total", {{"rank", "0"}}), 0);
  EXPECT_GT(value("cairn_checkpoint_timestamp_seconds", {{"rank", "0"}}), 1.7e9);
  EXPECT_GT(value("cairn_step_part_seconds", {{"rank", "0"}, {"part", "forward"}}), 0.0);
}

}  // namespace
}  // namespace cairn::observe
