// Steps that are profiled: what stands in the traces is what the program did in them, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "cairn/core/work_observer.h"
#include "cairn/observe/run.h"
#include "clock.h"
#include "observe/trace_files.h"
#include "support/expect_error.h"
#include "trace.h"
#include "writer.h"

namespace cairn::observe {
namespace {

using core::InvalidArgument;
using nlohmann::json;
using testing::ElementsAre;
using testing::UnorderedElementsAre;
using Kind = core::ObservedWork::Kind;

std::vector<std::string> names_of(const std::vector<json>& events) {
  std::vector<std::string> names;
  for (const json& event : events) names.push_back(event["name"]);
  return names;
}

std::vector<std::string> traced_steps(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const std::string& name : names_of(test::events_of(test::chrome_trace_of(folder), "X"))) {
    if (name.starts_with("ProfilerStep#")) names.push_back(name.substr(13));
  }
  return names;
}

const json& event_called(const std::vector<json>& events, const std::string& name) {
  for (const json& event : events) {
    if (event["name"] == name) return event;
  }
  ADD_FAILURE() << "no " << name;
  return events.front();
}

TEST(Trace, HasTheStepsThatWereAskedFor) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.profile = ProfiledSteps{2, 4}});
    for (int i = 1; i <= 3; ++i) run.step({});
    EXPECT_FALSE(std::filesystem::exists(folder / "trace.json"));
    for (int i = 4; i <= 9; ++i) run.step({});
  }
  EXPECT_THAT(traced_steps(folder.string()), ElementsAre("2", "3", "4"));
}

TEST(Trace, AWindowStandsInPlaceOfTheOneBefore) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.profile = ProfiledSteps{1, 1}});
    run.step({});
    run.step({});
    run.profile(4, 5);
    for (int i = 3; i <= 9; ++i) run.step({});
  }
  EXPECT_THAT(traced_steps(folder.string()), ElementsAre("4", "5"));
}

TEST(Trace, OfARunThatEndsWithinItHasWhatThereIs) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.profile = ProfiledSteps{2, 40}});
    for (int i = 1; i <= 5; ++i) run.step({});
  }
  EXPECT_THAT(traced_steps(folder.string()), ElementsAre("2", "3", "4", "5"));
}

TEST(Trace, AResumedRunProfilesWhatIsLeft) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.first_step = 8, .profile = ProfiledSteps{2, 8}});
    run.step({});
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "trace.json"));
  {
    observe::Run run(folder.string(), {.first_step = 8, .profile = ProfiledSteps{2, 9}});
    for (int i = 9; i <= 12; ++i) run.step({});
  }
  EXPECT_THAT(traced_steps(folder.string()), ElementsAre("9"));
}

TEST(Trace, RefusesStepsThatCannotBe) {
  const test::TemporaryFolder folder;
  observe::Run run(folder.string());
  run.step(7, {});
  test::expect_error<InvalidArgument>([&] { run.profile(7, 9); }, {"after step 7", "7 to 9"});
  test::expect_error<InvalidArgument>([&] { run.profile(9, 8); }, {"9 to 8"});
  run.profile(9, 10);
  run.profile(8, 9);  // in place of the one that has not begun; begins at once
  test::expect_error<InvalidArgument>([&] { run.profile(20, 21); },
                                      {"one profile at a time", "8 to 9"});
}

// Times, rows, kinds, flows and numbers of a window, in both files.
class OneWindow : public testing::Test {
 protected:
  static void pause(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

  void SetUp() override {
    observe::Run run(folder_.string(), {.profile = ProfiledSteps{2, 3}});
    { const Span early(run, "early"); }
    run.step({{"loss", 9}});
    step(run, 5);
    run.step({{"loss", 0.5}});
    step(run, 10);
    run.step({{"loss", std::nan("")}, {"lr", 2}});
    { const Span late(run, "late"); }
    run.step({{"loss", 8}});
  }

  void step(observe::Run& run, int ms) {
    const Span outer(run, "forward");
    std::uint64_t flow = 0;
    {
      const core::WorkSpan operation(Kind::backward, "linear", Device{});
      const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
      held_ = Tensor::empty({ms * 1024}, DType::u8);
      pause(ms);
      const core::WorkFlowGuard bucket;
      flow = core::WorkFlowGuard::current();
    }
    const core::Stream stream = core::Stream::create({}, "copies");
    stream.submit([&] {
      pause(ms);
      core::WorkSpan collective(Kind::collective, "all_reduce", Device{});
      collective.set_collective(static_cast<std::uint64_t>(ms), 64, "in the group of ranks 1, 3");
      collective.add_flow(flow);
    });
    stream.synchronize();
    core::WorkSpan update(Kind::update, "FusedSGD", Device{});
    update.add_flow(flow);
    update.add_flow(flow);
    update.add_flow(0);
  }

  test::TemporaryFolder folder_;
  Tensor held_;
};

TEST_F(OneWindow, IsInChromesFile) {
  const json trace = test::chrome_trace_of(folder_.string());
  EXPECT_EQ(trace["distributedInfo"]["rank"], 0);
  EXPECT_EQ(trace["distributedInfo"]["world_size"], 1);
  EXPECT_EQ(trace["lost_records"], 0);
  const std::vector<json> slices = test::events_of(trace, "X");
  EXPECT_THAT(names_of(slices),
              UnorderedElementsAre("ProfilerStep#2", "ProfilerStep#3", "forward", "forward",
                                   "linear", "linear", "copies", "copies", "all_reduce",
                                   "all_reduce", "FusedSGD", "FusedSGD"));
  for (const json& slice : slices) {
    EXPECT_EQ(slice["pid"], 0);
    EXPECT_GE(slice["ts"], 0.0);
    EXPECT_GE(slice["dur"], 0.0);
  }
  EXPECT_GE(event_called(slices, "copies")["dur"], 5e3);  // microseconds
  EXPECT_LT(event_called(slices, "copies")["dur"], 5e5);
  EXPECT_EQ(event_called(slices, "linear")["cat"], "cpu_op");
  EXPECT_EQ(event_called(slices, "linear")["args"]["kind"], "backward");
  EXPECT_EQ(event_called(slices, "forward")["cat"], "user_annotation");
  const json all_reduce = event_called(slices, "all_reduce");
  EXPECT_EQ(all_reduce["args"], (json{{"kind", "collective"},
                                      {"sequence", 5},
                                      {"bytes", 64},
                                      {"group", "in the group of ranks 1, 3"}}));
  std::vector<std::string> rows;
  for (const json& row : test::events_of(trace, "M")) {
    if (row["name"] == "thread_name") rows.push_back(row["args"]["name"]);
  }
  EXPECT_THAT(rows, UnorderedElementsAre("steps", "training", "copies", "copies 2"));
}

TEST_F(OneWindow, HasAnArrowFromBackwardOverCollectiveToUpdate) {
  const json trace = test::chrome_trace_of(folder_.string());
  for (const char* phase : {"s", "t", "f"}) {
    const auto points = test::events_of(trace, phase);
    ASSERT_EQ(points.size(), 2u) << phase;
    EXPECT_NE(points[0]["id"], points[1]["id"]);
    const char* of = *phase == 's' ? "linear" : *phase == 't' ? "all_reduce" : "FusedSGD";
    for (const json& point : points) {
      const auto slices = test::events_of(trace, "X");
      EXPECT_TRUE(std::any_of(slices.begin(), slices.end(), [&](const json& slice) {
        return slice["name"] == of && slice["tid"] == point["tid"] && slice["ts"] == point["ts"];
      })) << point;
    }
  }
}

TEST_F(OneWindow, HasTheNumbersOfItsStepsAndMemory) {
  const json trace = test::chrome_trace_of(folder_.string());
  std::vector<std::pair<std::string, double>> numbers;
  double workspace = 0;
  for (const json& event : test::events_of(trace, "C")) {
    const auto name = event["name"].get<std::string>();
    if (name == "memory")
      workspace = std::max(workspace, event["args"]["workspace"].get<double>());
    else
      numbers.emplace_back(name, event["args"][name].get<double>());
  }
  EXPECT_THAT(numbers, ElementsAre(testing::Pair("loss", 0.5), testing::Pair("lr", 2.0)));
  EXPECT_GE(workspace, 10 * 1024);
}

// What shares a row lies side by side or within: a viewer shows nothing else.
TEST_F(OneWindow, NothingCrosses) {
  const auto slices = test::events_of(test::chrome_trace_of(folder_.string()), "X");
  for (const json& a : slices) {
    for (const json& b : slices) {
      if (a["tid"] != b["tid"]) continue;
      const double begin = a["ts"], end = begin + a["dur"].get<double>();
      const double first = b["ts"], last = first + b["dur"].get<double>();
      EXPECT_FALSE(begin < first && first < end && end < last) << a << " and " << b;
    }
  }
}

TEST_F(OneWindow, PerfettosDefinitionsReadTheSame) {
  if (!test::perfetto_is_here())
    GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const json trace = test::perfetto_trace_of(folder_.string());
  ASSERT_TRUE(trace.is_object());
  ASSERT_EQ(trace["processes"].size(), 1u);
  EXPECT_EQ(trace["processes"][0]["name"], "rank 0");
  std::vector<std::tuple<std::string, std::string, double, double>> here, there;
  for (const json& slice : trace["slices"]) {
    const std::string name = slice["kind"] == "step"
                                 ? "ProfilerStep#" + slice["name"].get<std::string>().substr(5)
                                 : slice["name"].get<std::string>();
    here.emplace_back(name, slice["kind"].get<std::string>(), slice["begin"].get<double>(),
                      slice["end"].get<double>());
    if (name == "all_reduce") {
      EXPECT_EQ(slice["args"]["bytes"], 64);
      EXPECT_EQ(slice["args"]["group"], "in the group of ranks 1, 3");
      EXPECT_EQ(slice["track"].get<std::string>().substr(0, 6), "copies");
    }
    EXPECT_EQ(slice["flows"].size(),
              name == "all_reduce" || name == "linear" || name == "FusedSGD" ? 1u : 0u)
        << name;
  }
  for (const json& slice : test::events_of(test::chrome_trace_of(folder_.string()), "X")) {
    const double begin = std::round(1e3 * slice["ts"].get<double>());
    there.emplace_back(slice["name"].get<std::string>(), slice["args"]["kind"].get<std::string>(),
                       begin, begin + std::round(1e3 * slice["dur"].get<double>()));
  }
  std::sort(here.begin(), here.end());
  std::sort(there.begin(), there.end());
  EXPECT_EQ(here, there);
  std::vector<double> losses;
  std::int64_t workspace = 0;
  for (const json& counter : trace["counters"]) {
    if (counter["track"] == "loss") losses.push_back(counter["value"]);
    if (counter["track"] != "memory: workspace") continue;
    EXPECT_EQ(counter["unit"], 3);  // UNIT_SIZE_BYTES
    workspace = std::max(workspace, counter["value"].get<std::int64_t>());
  }
  EXPECT_THAT(losses, ElementsAre(0.5));
  EXPECT_GE(workspace, 10 * 1024);
}

TEST(Trace, SaysWhatIsLost) {
  const test::TemporaryFolder folder;
  constexpr int kTold = 3000;
  {
    observe::Run run(folder.string(), {.profile = ProfiledSteps{1, 1}});
    const std::string name(4000, 'x');
    for (int i = 0; i < kTold; ++i) const Span span(run, name);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until there is room again
    run.step({});
  }
  const json trace = test::chrome_trace_of(folder.string());
  const std::size_t there = test::events_of(trace, "X").size() - 1;  // the step
  EXPECT_GT(trace["lost_records"], 0);
  EXPECT_EQ(there + trace["lost_records"].get<std::size_t>(), static_cast<std::size_t>(kTold));
}

// Clocks of ranks whose offsets are known, over an exchange that keeps them waiting.
TEST(Clocks, OffsetsAreFoundWithinTheirBounds) {
  constexpr int kRanks = 4;
  const std::array<double, kRanks> ahead = {0, 1000.5, -3, 1e-4};
  std::array<ClockMarks, kRanks> marks;
  std::barrier barrier(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const World world(rank, kRanks, [&](const std::string&, std::string_view) {
        if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        barrier.arrive_and_wait();
        return std::vector<std::string>(kRanks);
      });
      const auto at = static_cast<std::size_t>(rank);
      marks[at] = mark_rounds(world, "", [&] { return steady_seconds() + ahead[at]; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    const ClockOffset offset = offset_to(marks[0], marks[rank]);
    EXPECT_NEAR(offset.seconds, -ahead[rank], offset.error + 1e-9) << rank;
    EXPECT_LE(offset.error, 0.05) << rank;  // a busy machine's
  }
}

TEST(Clocks, BoundsOfAllRoundsHoldTogether) {
  const ClockMarks reference{.came = {0, 10}, .left = {1, 11}};
  const ClockMarks other{.came = {100.4, 110.1}, .left = {100.5, 111}};  // some 100 s ahead
  const ClockOffset offset = offset_to(reference, other);  // the first round's are the closer ones
  EXPECT_DOUBLE_EQ(offset.seconds, (-100.5 + -99.4) / 2);
  EXPECT_DOUBLE_EQ(offset.error, (100.5 - 99.4) / 2);
}

// The same moment on two ranks whose clocks are 5 s apart.
TEST(Trace, PartsOfTwoClocksMeet) {
  const auto part_of = [](double ahead) {
    Ring ring;
    {
      Message message(ring);
      message.put(Told::work);
      put_work(message,
               {.kind = Kind::collective, .name = "x", .begin = 2 + ahead, .end = 3 + ahead});
    }
    std::vector<char> bytes;
    ring.take(bytes);
    TracePart part;
    part.begin = 1 + ahead, part.end = 4 + ahead;
    part.marks = {{ahead, 5 + ahead}, {0.0001 + ahead, 5.0001 + ahead}};
    add_message(part.messages, 0, {bytes.data(), bytes.size()});
    return decode(encode(part));
  };
  const TracePart zero = part_of(0), one = part_of(5);
  const RankTrace here = read_part(zero, 0, 2, {}, zero.begin);
  const RankTrace there = read_part(one, 1, 2, offset_to(zero.marks, one.marks), zero.begin);
  ASSERT_EQ(here.slices.size(), 1u);
  ASSERT_EQ(there.slices.size(), 1u);
  EXPECT_EQ(here.slices[0].begin, 1'000'000'000);
  EXPECT_NEAR(static_cast<double>(there.slices[0].begin), 1e9, 1e6);
  EXPECT_NEAR(static_cast<double>(there.slices[0].end), 2e9, 1e6);
  EXPECT_LE(there.clock_error, 1e-3);
}

/// Step 4 is under way when the signal comes.
TEST(ProfileOnSignal, IsOfTheNextFiveSteps) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    for (int step = 1; step <= 12; ++step) {
      run.step({{"loss", 1}});
      if (step == 3) (void)raise(SIGUSR2);
    }
  }
  const json trace = test::chrome_trace_of(folder.string());
  EXPECT_THAT(names_of(test::events_of(trace, "X")),
              testing::ElementsAre("ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7",
                                   "ProfilerStep#8", "ProfilerStep#9"));
  EXPECT_TRUE(std::filesystem::exists(folder / "trace.perfetto-trace"));
}

TEST(ProfileOnSignal, IsNotTakenFromTheProgram) {
  struct sigaction before {};
  ASSERT_EQ(sigaction(SIGUSR2, nullptr, &before), 0);
  ASSERT_NE(signal(SIGUSR2, SIG_IGN), SIG_ERR);
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    for (int step = 1; step <= 12; ++step) {
      run.step({{"loss", 1}});
      if (step == 3) (void)raise(SIGUSR2);
    }
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "trace.json"));
  sigaction(SIGUSR2, &before, nullptr);
}

}  // namespace
}  // namespace cairn::observe
