// Ranks side by side: each one's own time, what it waits for others, its memory, and the slowest.
#include "ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "cairn/core/status.h"
#include "cairn/core/tensor.h"
#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "open_metrics.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using nlohmann::json;

World world_of(int rank, int ranks) {
  return {rank, ranks, [ranks](const std::string& value, std::string_view) {
            return std::vector<std::string>(static_cast<std::size_t>(ranks), value);
          }};
}

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

void wait_ms(int ms) {
  const core::WaitMark wait("waiting");
  sleep_ms(ms);
}

/// A run of three ranks, threads here: what each does in a step.
void run_three(const std::string& folder, int steps, const std::function<void(int rank)>& step) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      observe::Run run(folder, {.world = world_of(rank, 3)});
      for (int i = 0; i < steps; ++i) {
        step(rank);
        run.step({{"loss", 1}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Ranks, TheSlowestIsNamed) {
  const test::TemporaryFolder folder;
  const Tensor held = Tensor::empty({1000});
  run_three(folder.string(), 30, [](int rank) {
    sleep_ms(rank == 2 ? 12 : 4);
    if (rank != 2) wait_ms(10);
  });
  const json page = test::page_data(folder.string());
  EXPECT_EQ(page["slowest"], 2);
  ASSERT_EQ(page["side_by_side"].size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    const json& state = page["side_by_side"][static_cast<std::size_t>(rank)];
    EXPECT_EQ(state["rank"], rank);
    EXPECT_EQ(state["step"], 30);
    EXPECT_EQ(state["running"], false);
    EXPECT_GT(state["memory"], 3999);
    EXPECT_EQ(state["points"].size(), 30u);
    EXPECT_EQ(state["points"][29][0], 30);
    EXPECT_GE(state["own"], rank == 2 ? 0.012 : 0.004);
    EXPECT_LT(state["own"], rank == 2 ? 0.036 : 0.012);
    EXPECT_GE(state["wait"], rank == 2 ? 0.0 : 0.01);
    EXPECT_LT(state["wait"], rank == 2 ? 0.001 : 0.03);
    EXPECT_THAT(state["where"].get<std::string>(), testing::HasSubstr(", process "));
  }
  // Another rank's page is of itself alone.
  EXPECT_EQ(test::page_data(folder / "rank-1")["side_by_side"].size(), 1u);
  EXPECT_EQ(test::page_data(folder / "rank-1")["slowest"], -1);
}

TEST(Ranks, WaitingIsInNoSpan) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.world = world_of(1, 2)});
    run.step({});
    {
      const Span outer(run, "outer");
      wait_ms(40);
      sleep_ms(10);
      {
        const Span inner(run, "inner");
        sleep_ms(10);
        wait_ms(40);
      }
    }
    run.step({});
    run.step({});
  }
  const auto steps = test::step_lines(folder / "rank-1");
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_GE(steps[1]["seconds/wait"], 0.08);
  EXPECT_LT(steps[1]["seconds/wait"], 0.16);
  for (const char* part : {"seconds/outer", "seconds/inner"}) {
    EXPECT_GE(steps[1][part], 0.01) << part;
    EXPECT_LT(steps[1][part], 0.045) << part;
  }
  EXPECT_EQ(steps[2]["seconds/wait"], 0.0);
}

TEST(Ranks, ARunAloneWaitsForNobody) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    wait_ms(1);
    run.step({});
    EXPECT_THROW({ const Span span(run, "wait"); }, core::InvalidArgument);
  }
  EXPECT_FALSE(test::step_lines(folder.string()).at(0).contains("seconds/wait"));
  EXPECT_EQ(test::page_data(folder.string())["side_by_side"].size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(folder / "rank.json"));
}

// Its page is the last word on the job.
TEST(Ranks, TheFirstEndsAfterTheOthers) {
  const test::TemporaryFolder folder;
  auto zero = std::make_unique<observe::Run>(folder.string(), RunOptions{.world = world_of(0, 2)});
  auto one = std::make_unique<observe::Run>(folder.string(), RunOptions{.world = world_of(1, 2)});
  sleep_ms(200);
  std::thread late([&] {
    sleep_ms(300);
    one->step(17, {});
    one.reset();
  });
  zero.reset();
  late.join();
  const json state = test::page_data(folder.string())["side_by_side"].at(1);
  EXPECT_EQ(state["step"], 17);
  EXPECT_EQ(state["running"], false);
}

TEST(Ranks, OfARankThatIsNoMoreNobodyWaitsLong) {
  const test::TemporaryFolder folder;
  std::filesystem::create_directories(folder / "rank-1");
  std::filesystem::create_directories(folder / "rank-2");
  std::ofstream(folder / "rank-1/rank.json") << R"({"rank":1,"own":"much"})";
  std::ofstream(folder / "rank-2/rank.json")
      << R"({"rank":2,"where":"h","running":true,"renewed":1,"step":3,"memory":4,"own":0.5,)"
      << R"("wait":0.25,"points":[[3,0.5,0.25]]})";
  const auto start = std::chrono::steady_clock::now();
  { observe::Run(folder.string(), {.world = world_of(0, 3)}).step({}); }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  const json states = test::page_data(folder.string())["side_by_side"];
  ASSERT_EQ(states.size(), 2u);  // the first's is none
  EXPECT_EQ(states[1]["where"], "h");
  EXPECT_EQ(states[1]["wait"], 0.25);
  EXPECT_EQ(states[1]["points"], (json{{3, 0.5, 0.25}}));
}

TEST(Ranks, ATypicalStepIsOneOfTheLaterHalf) {
  History history;
  for (std::int64_t step = 1; step <= 100; ++step) {
    const double own = step <= 50 ? 9 : step == 70 ? 1000 : 2;
    const double wait = step % 2 == 0 ? 0.5 : 0;  // no word of it at some steps
    StepRecord record{.step = step, .values = {{"seconds/step", own + wait}, {"memory/peak", 7}}};
    if (wait > 0) record.values.emplace_back("seconds/wait", wait);
    history.add(record);
  }
  const RankState state = rank_state(history, {.rank = 3, .where = "here"});
  EXPECT_EQ(state.own, 2);  // a save, or a new process, is no typical step
  EXPECT_NEAR(state.wait, 0.5 * 23 / 48, 1e-9);
  EXPECT_EQ(state.memory, 7);
  EXPECT_EQ(state.step, 100);
  ASSERT_EQ(state.points.size(), 100u);
  EXPECT_EQ(state.points[1].own, 9);
  EXPECT_EQ(state.points[1].wait, 0.5);
  EXPECT_EQ(state.points[2].wait, 0);
}

TEST(Ranks, ALongRunHasAHundredPoints) {
  History history;
  for (std::int64_t step = 1; step <= 250; ++step)
    history.add({.step = step, .values = {{"seconds/step", static_cast<double>(step)}}});
  const RankState state = rank_state(history, {});
  ASSERT_EQ(state.points.size(), 84u);  // three steps each
  EXPECT_EQ(state.points[0].step, 3);
  EXPECT_EQ(state.points[0].own, 2);
  EXPECT_EQ(state.points[83].step, 250);
  EXPECT_EQ(state.points[83].own, 250);
}

TEST(Ranks, SlowIsATenthMoreThanTheOthersMedian) {
  const auto of = [](const std::vector<double>& own) {
    std::vector<RankState> ranks;
    for (const double seconds : own)
      ranks.push_back({.rank = static_cast<int>(ranks.size()), .own = seconds});
    const RankState* slow = slowest(ranks);
    return slow == nullptr ? -1 : slow->rank;
  };
  EXPECT_EQ(of({1.0}), -1);
  EXPECT_EQ(of({1.0, 1.09}), -1);
  EXPECT_EQ(of({1.0, 1.11}), 1);
  EXPECT_EQ(of({5.0, 1.0, 1.0, 4.0}), 0);
  EXPECT_EQ(of({1.0, 5.0, 5.0, 5.0}), -1);
}

TEST(Ranks, NobodyIsNamedWhileAWordIsOld) {
  std::vector<RankState> ranks(2);
  ranks[0] = {.rank = 0, .step = 100, .own = 1};
  ranks[1] = {.rank = 1, .step = 90, .own = 2};
  ASSERT_NE(slowest(ranks), nullptr);
  ranks[1].step = 89;
  EXPECT_EQ(slowest(ranks), nullptr);
}

}  // namespace
}  // namespace cairn::observe
