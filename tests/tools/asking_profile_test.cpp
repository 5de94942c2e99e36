// cairn-run profile, of runs that go on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/observe/run.h"
#include "cairn/parallel/process_group.h"
#include "observe/trace_files.h"
#include "parallel/ranks.h"
#include "shell.h"

namespace cairn::test {
namespace {

using nlohmann::json;
using observe::ProfiledSteps;
using testing::ContainsRegex;
using testing::HasSubstr;

ShellResult asked_for_profile(const std::string& arguments) {
  return shell("timeout 30 " + std::string(CAIRN_RUN_PROGRAM) + " profile " + arguments);
}

/// Somebody at another terminal.
class Asker {
 public:
  explicit Asker(const std::string& arguments)
      : thread_([this, arguments] {
          const std::string told = (folder_ / "told").string();
          result_ = asked_for_profile(arguments + " >" + told + "; status=$?; cat " + told +
                                      "; exit $status");
          done_ = true;
        }) {}
  ~Asker() { wait(); }
  bool has_asked() const { return read_text(folder_ / "told").find("asked") != std::string::npos; }
  bool done() const { return done_; }
  const ShellResult& wait() {
    if (thread_.joinable()) thread_.join();
    return result_;
  }

 private:
  TemporaryFolder folder_;
  std::atomic<bool> done_ = false;
  ShellResult result_;
  std::thread thread_;
};

std::vector<std::int64_t> steps_in(const json& trace) {
  std::vector<std::int64_t> steps;
  for (const json& slice : events_of(trace, "X")) {
    const std::string name = slice["name"];
    if (name.starts_with("ProfilerStep#")) steps.push_back(std::stoll(name.substr(13)));
  }
  return steps;
}

void pause() {
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

/// Steps of a run of this process alone, while somebody asks it.
ShellResult step_while_asked(observe::Run& run, const std::string& arguments) {
  run.step({});
  Asker asker(std::to_string(getpid()) + " " + arguments);
  for (; !asker.done(); pause()) run.step({{"loss", 1}});
  return asker.wait();
}

TEST(AskingForAProfile, TracesTheNextStepsOfARunThatGoesOn) {
  const TemporaryFolder folder;
  observe::Run run(folder / "run");
  for (const int count : {4, 2}) {
    const std::int64_t before = run.last_step();
    const ShellResult result = step_while_asked(run, "--steps " + std::to_string(count));
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr((folder / "run" / "trace.perfetto-trace").string()));
    const std::vector<std::int64_t> steps = steps_in(chrome_trace_of(folder / "run"));
    ASSERT_EQ(steps.size(), static_cast<std::size_t>(count)) << result.out;
    EXPECT_GT(steps.front(), before);
    EXPECT_EQ(steps.back(), steps.front() + count - 1);
    EXPECT_TRUE(std::filesystem::file_size(folder / "run" / "trace.perfetto-trace") > 0);
  }
}

TEST(AskingForAProfile, StepsMayBeNamed) {
  const TemporaryFolder folder;
  observe::Run run(folder / "run", {.first_step = 1000});
  const ShellResult result = step_while_asked(run, "--steps 1500:1502");
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(steps_in(chrome_trace_of(folder / "run")), testing::ElementsAre(1500, 1501, 1502));
}

TEST(AskingForAProfile, SaysWhyThereIsNone) {
  const TemporaryFolder folder;
  const std::string own = std::to_string(getpid());
  const auto refused = [](const std::string& arguments, const std::string& why) {
    const ShellResult result = asked_for_profile(arguments);
    EXPECT_NE(result.status, 0) << arguments;
    EXPECT_THAT(result.err, HasSubstr(why)) << arguments;
  };
  {
    observe::Run run(folder / "run",
                     {.first_step = 10, .profile = ProfiledSteps{1000000, 1000001}});
    const ShellResult passed = step_while_asked(run, "--steps 2:3");
    EXPECT_EQ(passed.status, 1);
    EXPECT_THAT(passed.out, HasSubstr("steps 1000000 to 1000001 are to be profiled already"));
    for (const char* steps : {"0", "-1", "3:2", "0:2", "3:", ":3", "x", "3x", "1:2:3"})
      refused(own + " --steps=" + steps, "--steps must be a number of steps or FIRST:LAST");
  }
  {
    observe::Run run(folder / "run", {.first_step = 10});
    const ShellResult passed = step_while_asked(run, "--steps 2:3");
    EXPECT_EQ(passed.status, 1);
    EXPECT_THAT(passed.out, ContainsRegex("step [0-9]+ has ended"));
  }
  refused(own, "has an observe::Run");
}

/// Steps of this process alone, some of them in what somebody has asked for.
void step_into_what_is_asked(observe::Run& run, const Asker& asker) {
  for (; !asker.has_asked(); pause()) run.step({});
  for (int i = 0; i < 10; ++i) run.step({});
}

/// The program's own profile comes first, and what had been asked for has what there is.
TEST(AskingForAProfile, TheProgramsOwnCutsItShort) {
  const TemporaryFolder folder;
  std::optional<observe::Run> run(folder / "run");
  run->step({});
  Asker asker(std::to_string(getpid()) + " --steps 1000000");
  step_into_what_is_asked(*run, asker);
  const std::int64_t last = run->last_step();
  run->profile(last + 1, last + 2);
  for (; !asker.done(); pause()) run->step({});
  EXPECT_EQ(asker.wait().status, 0) << asker.wait().out;
  for (int i = 0; i < 5; ++i) run->step({});
  run.reset();
  EXPECT_THAT(steps_in(chrome_trace_of(folder / "run")), testing::ElementsAre(last + 1, last + 2));
}

TEST(AskingForAProfile, ARunThatEndsGivesWhatThereIs) {
  const TemporaryFolder folder;
  std::optional<observe::Run> run(folder / "run");
  run->step({});
  Asker asker(std::to_string(getpid()) + " --steps 1000000");
  step_into_what_is_asked(*run, asker);
  run.reset();
  EXPECT_EQ(asker.wait().status, 0) << asker.wait().out;
  EXPECT_THAT(asker.wait().out, HasSubstr("has 1 of 1 ranks"));
  EXPECT_GT(steps_in(chrome_trace_of(folder / "run")).size(), 3u);
}

TEST(AskingForAProfile, OneAsksAtATime) {
  const TemporaryFolder folder;
  observe::Run run(folder / "run");
  run.step({});
  Asker asker(std::to_string(getpid()) + " --steps 1000000:1000001");
  for (; !asker.has_asked(); pause()) run.step({});
  const ShellResult second = asked_for_profile(std::to_string(getpid()));
  EXPECT_EQ(second.status, 1);
  EXPECT_THAT(second.err, HasSubstr("another process asks process"));
  for (const std::int64_t step : {999999, 1000000}) run.step(step, {});
  run.step(1000001, {});
  EXPECT_EQ(asker.wait().status, 0) << asker.wait().out;
  EXPECT_THAT(steps_in(chrome_trace_of(folder / "run")), testing::ElementsAre(1000000, 1000001));
}

/// Trains until the asker is done, on all ranks alike.
void train_while_asked(const parallel::ProcessGroup& group, observe::Run& run,
                       const std::function<bool()>& done) {
  for (bool ends = false; !ends; pause()) {
    group.all_reduce(Tensor::full({2}, 1), parallel::ReduceOp::sum, "metric");
    if (group.rank() == 1) pause();
    run.step({{"loss", 0.5}});
    ends = group.all_reduce_max(done() ? 1 : 0) > 0;
  }
}

/// The moment of each collective that both ranks have is the same in both files.
void expect_one_clock(const json& one, const json& other) {
  std::map<std::int64_t, std::pair<double, double>> begun_ended;
  for (const json& slice : events_of(one, "X")) {
    if (slice["args"]["kind"] != "collective") continue;
    const double begin = slice["ts"];
    begun_ended[slice["args"]["sequence"]] = {begin, begin + slice["dur"].get<double>()};
  }
  int met = 0;
  for (const json& slice : events_of(other, "X")) {
    if (slice["args"]["kind"] != "collective") continue;
    const auto there = begun_ended.find(slice["args"]["sequence"]);
    if (there == begun_ended.end()) continue;
    ++met;
    const double begin = slice["ts"], end = begin + slice["dur"].get<double>();
    EXPECT_LE(begin, there->second.second + 1e3) << slice;
    EXPECT_LE(there->second.first, end + 1e3) << slice;
  }
  EXPECT_GE(met, 3);
}

TEST(AskingForAProfile, RanksOfAJobAreInOneFile) {
  const TemporaryFolder folder;
  const char* const given = std::getenv("CAIRN_TEST_FOLDER");
  const std::filesystem::path path = given != nullptr ? given : folder.string();
  setenv("CAIRN_TEST_FOLDER", path.c_str(), 1);
  const auto results = start_ranks(2, [&](int rank) {
    const auto group = parallel::ProcessGroup::from_environment();
    observe::Run run(path / "run", {.world = group.world()});
    if (rank == 0) {
      EXPECT_THAT(asked_for_profile("$MASTER_ADDR:$MASTER_PORT").err,
                  HasSubstr("rank 0 has told no step yet"));
    }
    group.barrier();
    run.step({});
    group.barrier();
    if (rank == 1) return train_while_asked(group, run, [] { return false; });
    Asker asker("$MASTER_ADDR:$MASTER_PORT --steps 5");
    train_while_asked(group, run, [&] { return asker.done(); });
    const ShellResult& result = asker.wait();
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr("asked 2 ranks of job 127.0.0.1:"));
    EXPECT_THAT(result.out, HasSubstr("trace.perfetto-trace has 2 of 2 ranks"));
    EXPECT_THAT(result.out, HasSubstr("rank-1/trace.json"));
  });
  if (given != nullptr) return;
  unsetenv("CAIRN_TEST_FOLDER");
  for (const RankResult& result : results) EXPECT_EQ(result.status, 0) << result.output;
  const json first = chrome_trace_of(path / "run"), second = chrome_trace_of(path / "run/rank-1");
  ASSERT_EQ(steps_in(first).size(), 5u);
  EXPECT_EQ(steps_in(first), steps_in(second));
  expect_one_clock(first, second);
  EXPECT_FALSE(std::filesystem::exists(path / "run/rank-1/trace.part"));
  if (!perfetto_is_here()) return;
  const json trace = perfetto_trace_of(path / "run");
  ASSERT_EQ(trace["processes"].size(), 2u);
}

// Who asked hears of each rank, and does not wait for the one that is gone.
TEST(AskingForAProfile, OfAJobOfWhichARankIsKilledEnds) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.string();
  setenv("CAIRN_TEST_FOLDER", path.c_str(), 1);
  const auto results = start_ranks(2, [&](int rank) {
    const auto group = parallel::ProcessGroup::from_environment();
    std::optional<observe::Run> run(std::in_place, path / "run",
                                    observe::RunOptions{.world = group.world()});
    run->step({});
    group.barrier();
    std::optional<Asker> asker;
    if (rank == 0) asker.emplace("$MASTER_ADDR:$MASTER_PORT --steps 1000000:1000001");
    const auto train = [&] {
      train_while_asked(group, *run, [&] { return asker && asker->has_asked(); });
      if (rank == 1) raise(SIGKILL);
      group.barrier();
    };
    EXPECT_THROW(train(), core::CommunicationError);
    for (int i = 0; i < 10; ++i) run->step({});
    EXPECT_FALSE(asker->done());  // rank 0 goes on
    run.reset();
    const ShellResult& result = asker->wait();
    EXPECT_EQ(result.status, 1) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr("rank 1: its run has ended"));
    EXPECT_THAT(result.out, HasSubstr("rank 0: its run has ended"));
  });
  unsetenv("CAIRN_TEST_FOLDER");
  if (results.empty()) return;  // a rank
  EXPECT_EQ(results[0].status, 0) << results[0].output;
}

}  // namespace
}  // namespace cairn::test
