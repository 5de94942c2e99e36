// The timeline of a step: what the device's own accounts say, and files that others read.
#include "cairn/checkpointing/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "checkpointing/temporary_folder.h"
#include "support/tensors.h"

namespace cairn::checkpointing::timelines {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

nn::Sequential chain() {
  manual_seed(1);
  nn::Sequential model;
  for (int i = 0; i < 6; ++i) {
    model.add(nn::Linear(64, 64));
    model.add(nn::GELU());
  }
  return model;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::size_t measured_peak(nn::Sequential& model, const Tensor& x) {
  core::reset_peak_memory(x.device());
  autograd::backward(autograd::mean(model(x)));
  const std::size_t peak = core::memory_stats(x.device()).peak_total;
  model.clear_grad();
  return peak;
}

TEST(Timeline, HasTheDevicesPeakAndEveryOperation) {
  nn::Sequential model = chain();
  const Tensor x = test::normal_tensor({256, 64}, 2);
  measured_peak(model, x);
  const std::size_t peak = measured_peak(model, x);
  const std::size_t before = core::memory_stats(x.device()).current_total;
  Timeline timeline("</script>plain");
  autograd::backward(autograd::mean(model(x)));
  timeline.count("loss scale", 1024);
  const TimelineRecord plain = timeline.snapshot();
  const auto& top = plain.samples[plain.peak_sample()];
  EXPECT_EQ(top.peak, peak);
  EXPECT_EQ(plain.samples.front().total, before);
  for (const auto& sample : plain.samples) {
    std::size_t sum = 0;
    for (const std::size_t bytes : sample.bytes) sum += bytes;
    ASSERT_EQ(sum, sample.total);
    ASSERT_GE(sample.peak, sample.total);
  }
  const auto count = [](const TimelineRecord& record, autograd::Phase phase) {
    return std::count_if(record.operations.begin(), record.operations.end(),
                         [&](const auto& o) { return o.phase == phase && o.end >= o.begin; });
  };
  EXPECT_EQ(count(plain, autograd::Phase::forward), 13);
  EXPECT_GE(count(plain, autograd::Phase::backward), 13);
  EXPECT_EQ(count(plain, autograd::Phase::recompute), 0);

  model.clear_grad();
  Timeline other("sqrt(n) segments");
  autograd::backward(autograd::mean(checkpoint_sequential(model, SqrtSegments{}, x)));
  const TimelineRecord recomputed = other.snapshot();
  EXPECT_GT(count(recomputed, autograd::Phase::recompute), 0);
  EXPECT_LT(recomputed.samples[recomputed.peak_sample()].peak, peak);

  const TemporaryFolder folder;
  const std::string page = folder / "memory.html";
  write_page(page, {plain, recomputed});
  const std::string text = read_text(page);
  EXPECT_THAT(text, HasSubstr("<\\/script>plain"));
  EXPECT_THAT(text, Not(HasSubstr("http")));  // no download
  const std::string trace = folder / "trace.json";
  write_trace(trace, plain);
  const nlohmann::json events = nlohmann::json::parse(read_text(trace))["traceEvents"];
  const auto events_of = [&](const char* kind) {
    return static_cast<std::size_t>(std::count_if(
        events.begin(), events.end(), [&](const auto& event) { return event["ph"] == kind; }));
  };
  EXPECT_EQ(events_of("X"), plain.operations.size());
  EXPECT_EQ(events_of("C"), plain.samples.size() + 1);
  EXPECT_EQ(events.back()["args"]["loss scale"], 1024);
  EXPECT_THROW(write_page(folder / "missing/memory.html", {plain}), core::IoError);
}

TEST(Timeline, ThePeakIsWhereMemoryWasHighestNotWhereItStood) {
  TimelineRecord record;
  record.samples = {
      {.total = 10, .peak = 10}, {.total = 20, .peak = 50}, {.total = 30, .peak = 30}};
  EXPECT_EQ(record.peak_sample(), 1u);
}

TEST(Timeline, WorkHasARowForEachStreamAndThread) {
  const auto work = [](core::ObservedWork::Kind kind, const char* stream) {
    const core::WorkStreamGuard guard(stream);
    const core::WorkSpan span(kind, "work");
  };
  using Kind = core::ObservedWork::Kind;
  Timeline timeline("work");
  const auto both = [&] {
    work(Kind::stream, "copies");
    work(Kind::collective, "copies");
  };
  std::thread([&] {
    both();
    std::thread(both).join();  // while this one lives: else it may have the same number
  }).join();
  work(Kind::collective, "");
  const TimelineRecord record = timeline.snapshot();
  ASSERT_EQ(record.work.size(), 5u);
  EXPECT_EQ(record.rows, (std::vector<std::string>{"copies", "copies", "collectives"}));
  const std::vector<int> rows = {0, 0, 1, 1, 2};
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(record.work[i].row, rows[i]);
    EXPECT_EQ(record.work[i].collective, i % 2 == 1 || i == 4);
  }
}

}  // namespace
}  // namespace cairn::checkpointing::timelines
