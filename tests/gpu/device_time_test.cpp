// A GPU's own time: of points in its streams, and of runs on it, whose host only queues work.
#include "cairn/core/device_time.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <set>
#include <thread>

#include "cairn/core/graph.h"
#include "cairn/core/status.h"
#include "cairn/core/work_observer.h"
#include "cairn/observe/run.h"
#include "gpu/sim/machine.h"
#include "gpu/vendor_support.h"
#include "observe/run_files.h"
#include "observe/trace_files.h"
#include "support/fake_world.h"

namespace cairn::test {
namespace {

using core::MarkedTime;
using core::TimeMark;
using nlohmann::json;
using observe::Span;
using State = MarkedTime::State;

constexpr Device kGpu{DeviceType::cuda, 0};

void pause(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

/// Work of the current stream that takes so long; the host does not wait.
void queue_work(int ms) {
  const core::DeviceGuard guard(kGpu);
  void* const stream = core::Stream::current(kGpu).native();
  const gpusim::Call call("work of a test");
  gpusim::enqueue(*gpusim::find_stream(stream), {"work of a test", [ms] { pause(ms); }});
}

void synchronize() {
  core::Stream::current(kGpu).synchronize();
}

double seconds_of(TimeMark mark) {
  const MarkedTime time = core::time_of(mark);
  EXPECT_EQ(time.state, State::reached);
  return time.seconds;
}

double host_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class DeviceTime : public testing::Test {
 protected:
  DeviceTime() { gpusim::set_schedule(gpusim::Schedule::late, 1); }
};

TEST_F(DeviceTime, IsThatOfTheStreamsWorkNotOfQueueing) {
  const double begin = host_seconds();
  const TimeMark before = core::mark_time(kGpu);
  queue_work(30);
  const TimeMark after = core::mark_time(kGpu);
  EXPECT_EQ(core::time_of(after).state, State::ahead);
  synchronize();
  EXPECT_GE(seconds_of(after) - seconds_of(before), 0.029);
  EXPECT_GE(seconds_of(before), begin);
  EXPECT_LE(seconds_of(after), host_seconds());
  EXPECT_EQ(seconds_of(after), seconds_of(after));  // as often as one likes
}

TEST_F(DeviceTime, OfAnIdleStreamIsTheHosts) {
  synchronize();
  const double begin = host_seconds();
  const TimeMark before = core::mark_time(kGpu);
  pause(20);
  const TimeMark after = core::mark_time(kGpu);
  const double end = host_seconds();
  EXPECT_GE(seconds_of(before), begin);
  EXPECT_LE(seconds_of(after), end + 1e-3);
  EXPECT_GE(seconds_of(after) - seconds_of(before), 0.019);
}

/// Begun while the device was behind, it would stay behind by as much.
TEST_F(DeviceTime, IsCorrectedWhereTheHostKnowsBetter) {
  queue_work(50);
  core::align_device_time(kGpu);
  const TimeMark early = core::mark_time(kGpu);  // as if reached at once
  synchronize();
  const double idle = host_seconds();
  const TimeMark late = core::mark_time(kGpu);
  (void)core::time_of(early);
  EXPECT_GE(seconds_of(late), idle);
  EXPECT_LE(seconds_of(late), host_seconds());
}

TEST_F(DeviceTime, ComparesStreams) {
  const core::Stream other = core::Stream::create(kGpu);
  const TimeMark here = core::mark_time(kGpu);
  TimeMark there;
  {
    const core::StreamGuard guard(other);
    queue_work(20);
    there = core::mark_time(kGpu);
  }
  other.synchronize();
  synchronize();
  EXPECT_GE(seconds_of(there) - seconds_of(here), 0.019);
}

TEST_F(DeviceTime, IsUnknownWithoutAMark) {
  EXPECT_EQ(core::mark_time({}).number, 0u);
  EXPECT_EQ(core::time_of({}).state, State::unknown);
  EXPECT_EQ(core::time_of({1u << 30}).state, State::unknown);
}

TEST_F(DeviceTime, IsUnknownOfMarksLongAgo) {
  const TimeMark first = core::mark_time(kGpu);
  TimeMark last;
  for (int i = 0; i < 16'384; ++i) last = core::mark_time(kGpu);
  synchronize();
  EXPECT_EQ(core::time_of(first).state, State::unknown);
  EXPECT_EQ(core::time_of(last).state, State::reached);
}

TEST_F(DeviceTime, HasNoMarkInACapture) {
  TimeMark mark{7};
  core::Graph graph(kGpu);
  graph.capture([&] { mark = core::mark_time(kGpu); });
  EXPECT_EQ(mark.number, 0u);
}

TEST_F(DeviceTime, IsUnknownWhereCudaFails) {
  const TimeMark mark = core::mark_time(kGpu);
  synchronize();
  gpusim::inject("cudaEventQuery", 1, cudaErrorInvalidResourceHandle);
  EXPECT_EQ(core::time_of(mark).state, State::unknown);
  gpusim::inject("cudaEventRecord", 1, cudaErrorInvalidResourceHandle);
  EXPECT_EQ(core::mark_time(kGpu).number, 0u);
  gpusim::clear_injected();
}

/// The only step of a run.
json only_step(const test::TemporaryFolder& folder) {
  const auto steps = step_lines(folder.string());
  EXPECT_EQ(steps.size(), 1u);
  return steps.at(0);
}

TEST_F(DeviceTime, OfSpansIsTheGpus) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.device = kGpu});
    Span part(run, "forward");
    queue_work(60);
    {
      const Span inner(run, "attention");
      queue_work(20);
    }
    part.next("update");
    synchronize();  // where the host's time goes
    part.next("data");
    pause(10);
    run.step({{"loss", 1}});
    part.next("after");
  }
  const json step = only_step(folder);
  EXPECT_GE(step["seconds/forward"], 0.059);
  EXPECT_LT(step["seconds/forward"], 0.079);  // without the other
  EXPECT_GE(step["seconds/attention"], 0.019);
  EXPECT_LT(step["seconds/update"], 0.01);
  EXPECT_GE(step["seconds/step"], 0.089);
}

/// Nobody has waited for the GPU when the run ends, nor where somebody asks for advice.
TEST_F(DeviceTime, OfAGpuThatIsBehindIsWaitedForAtTheEnd) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.device = kGpu});
    {
      const Span part(run, "forward");
      queue_work(60);
    }
    run.step({{"loss", 1}});
  }
  EXPECT_GE(only_step(folder)["seconds/forward"], 0.059);
}

TEST_F(DeviceTime, IsTheHostsWhereTheGpuIsLost) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.device = kGpu});
    {
      const Span part(run, "forward");
      queue_work(60);
      pause(15);
      gpusim::inject("cudaEventQuery", 1, cudaErrorInvalidResourceHandle, /*and_later=*/true);
    }
    run.step({{"loss", 1}});
  }
  gpusim::clear_injected();
  EXPECT_GE(only_step(folder)["seconds/forward"], 0.014);
}

/// The stream waits for what another one does, with others; the host only queues the wait.
TEST_F(DeviceTime, OfWaitsForRanksIsTheStreams) {
  const test::TemporaryFolder folder;
  const core::Stream exchange = core::Stream::create(kGpu);
  {
    observe::Run run(folder.string(), {.world = World(1, 2, alike(2)), .device = kGpu});
    const auto wait = [&] {
      core::Event done(kGpu);
      {
        const core::StreamGuard guard(exchange);
        const core::WaitMark not_the_trainings("waiting for a collective");
        queue_work(50);
        done.record(exchange);
      }
      const core::WaitMark mark("waiting for gradients to be reduced");
      core::Stream::current(kGpu).wait(done);
    };
    {
      const Span part(run, "backward");
      queue_work(20);
      synchronize();
      wait();
    }
    wait();  // in no span
    synchronize();
    run.step({{"loss", 1}});
  }
  const json step = step_lines(folder.string() + "/rank-1").at(0);
  EXPECT_GE(step["seconds/wait"], 0.099);
  EXPECT_GE(step["seconds/backward"], 0.019);
  EXPECT_LT(step["seconds/backward"], 0.049);
  EXPECT_GE(step["seconds/step"], 0.119);
}

/// The run's own thread asks for times: it must not make another GPU ready for that.
TEST(DeviceTimeDeathTest, OfARunOnOneGpuTouchesNoOther) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto train = [] {
    const test::TemporaryFolder folder;
    {
      const Device second{DeviceType::cuda, 1};
      const core::DeviceGuard guard(second);
      observe::Run run(folder.string(), {.device = second});
      for (int step = 0; step < 3; ++step) {
        const Span part(run, "forward");
        run.step({{"loss", 1}});
      }
    }
    std::_Exit(gpusim::counters().contexts == std::set<int>{1} ? 0 : 1);
  };
  EXPECT_EXIT(train(), testing::ExitedWithCode(0), "");
}

TEST_F(DeviceTime, OfTracesIsTheGpus) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.device = kGpu, .profile = observe::ProfiledSteps{2, 2}});
    const auto step = [&] {
      queue_work(40);  // of no operation
      const Span part(run, "forward");
      const core::WorkSpan operation(core::ObservedWork::Kind::forward, "linear", kGpu);
      queue_work(40);
    };
    step();
    run.step({{"loss", 2}});
    step();
    run.step({{"loss", 1}});
  }
  const json trace = chrome_trace_of(folder.string());
  const auto slices = events_of(trace, "X");
  const auto slice = [&](const std::string& name) {
    const auto found = std::find_if(slices.begin(), slices.end(),
                                    [&](const json& one) { return one["name"] == name; });
    return found == slices.end() ? json{{"ts", NAN}, {"dur", NAN}} : *found;
  };
  const json whole = slice("ProfilerStep#2"), operation = slice("linear"), part = slice("forward");
  EXPECT_EQ(slices.size(), 3u);
  EXPECT_LT(whole["ts"], 5e3);  // microseconds
  EXPECT_GE(whole["dur"], 79e3);
  EXPECT_GE(operation["ts"], 39e3);
  EXPECT_GE(operation["dur"], 39e3);
  EXPECT_LT(operation["dur"], 79e3);
  EXPECT_LE(part["ts"], operation["ts"]);
  EXPECT_GE(part["dur"], operation["dur"]);
}

}  // namespace
}  // namespace cairn::test
