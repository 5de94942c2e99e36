// What streams and ranks do, in a step's timeline and in its trace.
#include "cairn/checkpointing/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "cairn/autograd/ops.h"
#include "cairn/core/stream.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {
namespace {

using checkpointing::Timeline;
using checkpointing::TimelineRecord;
using nlohmann::json;

// Two ranks, threads of this process: one collective by itself, one in a stream of the group's.
TimelineRecord exchange_and_copy() {
  const std::vector<ProcessGroup> groups = ProcessGroup::in_process(2);
  const auto rank = [](const ProcessGroup& group) {
    const Tensor x = Tensor::full({16}, 1, DType::f32, Device{});
    group.all_reduce(x, ReduceOp::sum, "metric");
    group.async(x.device(), [&] { group.all_reduce(x, ReduceOp::max, "weight"); }).wait();
  };
  Timeline timeline("two ranks");
  std::thread other(rank, groups[1]);
  rank(groups[0]);
  other.join();
  const core::Stream stream = core::Stream::create({}, "copies");
  stream.submit([] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  autograd::tanh(Tensor::full({4}, 1));
  stream.synchronize();
  return timeline.snapshot();
}

json trace_of(const TimelineRecord& record) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("cairn_trace_" + std::to_string(::getpid()) + ".json");
  checkpointing::write_trace(path.string(), record);
  std::ifstream file(path);
  json trace = json::parse(file);
  std::filesystem::remove(path);
  return trace["traceEvents"];
}

TEST(TimelineOfRanks, HasStreamsAndCollectives) {
  const TimelineRecord record = exchange_and_copy();
  const auto count = [&](const std::string& part, bool collective) {
    return std::count_if(record.work.begin(), record.work.end(), [&](const auto& work) {
      return work.collective == collective && work.name.find(part) != std::string::npos;
    });
  };
  EXPECT_EQ(count("'metric'", true), 2);  // of either rank
  EXPECT_EQ(count("'weight'", true), 2);
  EXPECT_EQ(count("copies", false), 1);
  for (const auto& work : record.work) {
    EXPECT_GE(work.begin, 0.0);
    EXPECT_LE(work.begin, work.end);
    EXPECT_LE(work.end, record.seconds());
    if (work.name == "copies") {
      EXPECT_GE(work.end - work.begin, 0.002);
    }
  }
}

TEST(TimelineOfRanks, ARowOfTheTraceIsOneThread) {
  const json events = trace_of(exchange_and_copy());
  std::vector<std::string> rows;
  for (const json& event : events) {
    if (event["name"] == "thread_name") rows.push_back(event["args"]["name"]);
  }
  EXPECT_EQ(std::count(rows.begin(), rows.end(), "operations"), 1);
  EXPECT_EQ(std::count(rows.begin(), rows.end(), "collectives"),
            4);  // outside and inside of streams
  EXPECT_EQ(std::count(rows.begin(), rows.end(), "copies"), 1);
  // What shares a row lies side by side or within: a viewer shows nothing else.
  for (const json& a : events) {
    for (const json& b : events) {
      if (a["ph"] != "X" || b["ph"] != "X" || a["tid"] != b["tid"]) continue;
      const double begin = a["ts"], end = begin + static_cast<double>(a["dur"]);
      const double first = b["ts"], last = first + static_cast<double>(b["dur"]);
      const bool crossing = begin < first && first < end && end < last;
      EXPECT_FALSE(crossing) << a << " and " << b;
    }
  }
}

TEST(TimelineOfRanks, NobodyIsToldAfterItsEnd) {
  { const Timeline timeline("short"); }
  const core::Stream stream = core::Stream::create({}, "later");
  stream.submit([] {});
  stream.synchronize();
}

}  // namespace
}  // namespace cairn::parallel
