// What a thread waits for other ranks is counted where it waits, and nowhere else.
#include "cairn/core/status.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "cairn/parallel/reducer.h"
#include "ranks.h"

namespace cairn::parallel {
namespace {

using core::waited_for_ranks;

void come_late() {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

double waited_in(const std::function<void()>& work) {
  const double before = waited_for_ranks();
  work();
  return waited_for_ranks() - before;
}

/// Rank 1 comes late: the other waits for it, itself for nobody.
void expect_the_early_one_waits(ProcessGroup& group, const std::function<void()>& meet) {
  if (group.rank() == 1) come_late();
  const double waited = waited_in(meet);
  if (group.rank() == 1)
    EXPECT_LT(waited, 0.05);
  else
    EXPECT_GE(waited, 0.08);
}

TEST(WaitMark, ACollectiveOfThisThread) {
  test::run_threads(2, [](ProcessGroup& group) {
    const Tensor x = Tensor::zeros({4});
    group.all_reduce(x);
    expect_the_early_one_waits(group, [&] { group.all_reduce(x); });
    expect_the_early_one_waits(group, [&] { group.exchange("", "values"); });
  });
}

TEST(WaitMark, WhatAReducerStillMoves) {
  test::run_threads(2, [](ProcessGroup& group) {
    const Tensor gradient = Tensor::zeros({1000});
    Reducer reducer(group);
    reducer.register_gradients({"w"}, {gradient});
    for (int pass = 0; pass < 2; ++pass) {
      reducer.mark_ready(0);
      reducer.wait();
    }
    expect_the_early_one_waits(group, [&] {
      EXPECT_LT(waited_in([&] { reducer.mark_ready(0); }), 0.05);  // in a stream of its own
      reducer.wait();
    });
  });
}

TEST(WaitMark, WorkThatIsWaitedFor) {
  test::run_threads(2, [](ProcessGroup& group) {
    const Tensor x = Tensor::zeros({4});
    group.all_reduce(x);
    expect_the_early_one_waits(
        group, [&] { group.async(x.device(), [&] { group.all_reduce(x); }).wait(); });
  });
}

TEST(WaitMark, OfWaitsWithinWaitsTheOutermostCounts) {
  const double waited = waited_in([] {
    const core::WaitMark outer("outer");
    const core::WaitMark inner("inner");
    come_late();
  });
  EXPECT_GE(waited, 0.1);
  EXPECT_LT(waited, 0.19);
}

TEST(WaitMark, ARankAloneWaitsForNobody) {
  const ProcessGroup group = ProcessGroup::single();
  EXPECT_EQ(waited_in([&] { group.all_reduce(Tensor::zeros({4})); }), 0.0);
}

}  // namespace
}  // namespace cairn::parallel
