// Advice on runs that were made to have a fault, and on their numbers.
#include "advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "cairn/core/memory.h"
#include "cairn/core/status.h"
#include "cairn/core/tensor.h"
#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

using Sentences = std::vector<std::string>;

void work(Run& run, const char* part, int ms) {
  const Span span(run, part);
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

/// Of a run of 40 steps, each of 10 ms; the page says the same.
Sentences advice_on(const std::function<void(Run& run, int step)>& step) {
  const test::TemporaryFolder folder;
  Sentences said;
  {
    observe::Run run(folder.string());
    for (int i = 1; i <= 40; ++i) {
      step(run, i);
      run.step({{"loss", 1}});
    }
    said = advice(run);
  }
  EXPECT_EQ(test::page_data(folder.string())["advice"].size(), said.size());
  return said;
}

TEST(AdviceOnARun, ThatWaitsForBatches) {
  EXPECT_THAT(advice_on([](observe::Run& run, int) {
                work(run, "data", 6);
                work(run, "forward", 4);
              }),
              ElementsAre(AllOf(StartsWith("data: "), HasSubstr(" of the step waits for batches; "),
                                HasSubstr("loader threads"))));
}

TEST(AdviceOnARun, ThatSavesTooOften) {
  EXPECT_THAT(advice_on([](observe::Run& run, int step) {
                work(run, "forward", 5);
                work(run, "save", 5);
                run.event(EventKind::checkpoint, "saved", {}, step);
              }),
              ElementsAre(AllOf(StartsWith("save: "), HasSubstr("half as many"))));
}

TEST(AdviceOnARun, ThatSkips) {
  EXPECT_THAT(advice_on([](observe::Run& run, int step) {
                work(run, "forward", 2);
                if (step % 4 == 0) run.event(EventKind::skip, "inf", "fc.weight");
              }),
              ElementsAre(AllOf(StartsWith("loss scale: 25 % of the last 20 steps were skipped"),
                                HasSubstr("fc.weight"))));
}

TEST(AdviceOnARun, OfSmallBatches) {
  const Tensor held = Tensor::empty({1 << 20});  // of a memory without end
  EXPECT_THAT(advice_on([](observe::Run& run, int) {
                work(run, "forward", 5);
                work(run, "update", 5);
                if (run.last_step() == 0)
                  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // memory is seen
              }),
              ElementsAre(AllOf(StartsWith("batch: "), HasSubstr("8 times as large"))));
}

TEST(AdviceOnARun, WithoutAFault) {
  EXPECT_THAT(advice_on([](observe::Run& run, int) {
                work(run, "forward", 3);
                work(run, "backward", 6);
              }),
              IsEmpty());
}

TEST(AdviceOnARun, WithASlowRank) {
  const test::TemporaryFolder folder;
  std::vector<Sentences> said(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      observe::Run run(folder.string(),
                       {.world = World(rank, 2, [](const std::string& value, std::string_view) {
                          return std::vector<std::string>{value, value};
                        })});
      for (int i = 0; i < 30; ++i) {
        work(run, "forward", rank == 1 ? 10 : 4);
        const core::WaitMark wait("waiting");
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 0 : 6));
        run.step({});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto page = test::page_data(folder.string())["advice"].get<Sentences>();
  EXPECT_THAT(page, ElementsAre(AllOf(StartsWith("ranks: rank 1 ("),
                                      HasSubstr("it would save every rank "))));
}

/// A history of steps of these parts (seconds), the first of which took long.
History told(std::int64_t steps, const NamedValues& parts, double memory = 0) {
  History history;
  for (std::int64_t step = 1; step <= steps; ++step) {
    StepRecord record{.step = step};
    double all = 0;
    for (const auto& [name, seconds] : parts) {
      all += seconds;
      record.values.emplace_back("seconds/" + name, step == 1 ? 100 : seconds);
    }
    record.values.emplace_back("seconds/step", step == 1 ? 1000 : all);
    if (memory > 0) record.values.emplace_back("memory/peak", memory);
    history.add(record);
  }
  return history;
}

TEST(Advice, CountsWhatItSaysOfData) {
  const auto on = [](double data, std::int64_t steps = 50) {
    return advice(told(steps, {{"data", data}, {"forward", 1 - data}}), {});
  };
  EXPECT_THAT(on(0.31), ElementsAre("data: 31 % of the step waits for batches; 2 times as many "
                                    "loader threads would hide it"));
  EXPECT_THAT(on(0.75), ElementsAre("data: 75 % of the step waits for batches; 4 times as many "
                                    "loader threads would hide it"));
  EXPECT_THAT(on(0.02), IsEmpty());
  EXPECT_THAT(on(0.31, 19), IsEmpty());  // too early to tell
}

TEST(Advice, CountsWhatItSaysOfRanks) {
  const History history = told(50, {{"forward", 1}});
  const auto on = [&](std::vector<RankState> ranks) {
    return advice(history, {.ranks = 3, .side_by_side = std::move(ranks)});
  };
  EXPECT_THAT(on({{.rank = 0, .own = 0.016, .wait = 0.015},
                  {.rank = 1, .own = 0.015, .wait = 0.016},
                  {.rank = 2, .where = "here, process 7", .own = 0.032, .wait = 0}}),
              ElementsAre("ranks: rank 2 (here, process 7) takes 32 ms of its own a step, the "
                          "others 16 ms; as fast as they, it would save every rank 50 % of a "
                          "step"));
  // Even ranks that wait: for what they send, not for each other.
  EXPECT_THAT(on({{.rank = 0, .own = 0.06, .wait = 0.05}, {.rank = 1, .own = 0.06, .wait = 0.04}}),
              ElementsAre("batch: 40 % of a step, the update and what ranks exchange, costs the "
                          "same for any batch; two micro-batches a step would save 20 % a sample"));
}

TEST(Advice, CountsWhatItSaysOfBatches) {
  const auto on = [](double limit) {
    return advice(told(50, {{"update", 0.4}, {"forward", 0.6}}, 1000), {.memory_limit = limit});
  };
  const std::string head = "batch: 40 % of a step, the update, costs the same for any batch; ";
  EXPECT_THAT(on(5000), ElementsAre(head + "memory has room for one 4 times as large, which would "
                                           "save 30 % a sample"));
  EXPECT_THAT(on(1e9), ElementsAre(head + "memory has room for one 8 times as large, which would "
                                          "save 35 % a sample"));
  for (const double limit : {0.0, 1100.0, 2200.0})
    EXPECT_THAT(on(limit), ElementsAre(head + "two micro-batches a step would save 20 % a sample"));
}

TEST(Advice, SkipsOfTheFirstHalfFoundTheScale) {
  History history = told(100, {{"forward", 1}});
  const auto skip = [&](std::int64_t step, const char* culprit) {
    history.add({.step = step, .kind = EventKind::skip, .text = "inf", .culprit = culprit});
  };
  for (std::int64_t step = 1; step <= 50; ++step) skip(step, "a");
  EXPECT_THAT(advice(history, {}), IsEmpty());
  for (const std::int64_t step : {51, 60, 70, 80, 90}) skip(step, step < 60 ? "b" : "c");
  EXPECT_THAT(advice(history, {}),
              ElementsAre("loss scale: 10 % of the last 50 steps were skipped, most for c; bf16, "
                          "or f32 where it overflows, would give them back"));
}

TEST(Advice, IsThreeSentencesThatSaveMost) {
  History history =
      told(100, {{"data", 0.1}, {"update", 0.3}, {"save", 0.4}, {"forward", 0.2}}, 10);
  history.add({.step = 90, .kind = EventKind::checkpoint});
  for (const std::int64_t step : {60, 70, 80, 90})
    history.add({.step = step, .kind = EventKind::skip, .text = "inf"});
  EXPECT_THAT(advice(history, {.memory_limit = 1e6}),
              ElementsAre(StartsWith("batch: "), StartsWith("save: 40 %"), StartsWith("data: ")));
}

}  // namespace
}  // namespace cairn::observe
