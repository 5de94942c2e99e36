// The planner's programme against all schedules of small chains, and what blocks take together.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "plan/chain_schedule.h"
#include "plan/merged_chain.h"
#include "plan/schedule_choice.h"

namespace cairn::checkpointing::planner {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// ---- What blocks take together, counted by hand

TEST(ChainProgramme, AViewHoldsTheMemoryOfItsInput) {
  std::vector<BlockProfile> chain(3);
  chain[0].output = chain[0].light_peak = chain[0].forward_peak = 100;
  chain[1].gradient = 100;  // a view of the 100
  chain[2].output = chain[2].gradient = 1;
  chain[2].forward_peak = 50;
  chain[2].saves_input = true;
  chain[2].backward_peak = 101;  // the gradients of its input and of its result
  EXPECT_EQ(simulate(chain, plain_schedule(3)).peak, 2 * 100u + 2 * 1);
}

TEST(ChainProgramme, AReplayEndsWithTheLastTensorThatItsLastBlockKeeps) {
  std::vector<BlockProfile> chain(2);
  chain[0].forward_seconds = 4;
  chain[0].tail_seconds = 3;
  chain[0].output = chain[0].gradient = 1;
  chain[0].light_peak = 2;
  chain[0].forward_peak = 100;
  chain[0].replay_peak = 20;
  chain[0].lead = 7;
  chain[1].output = chain[1].gradient = 1;
  chain[1].forward_peak = 10;
  chain[1].replay_peak = 5;  // runs whole: it is in no replay
  const ScheduleCost kept = simulate(chain, {{0, 1}, {1, 2}});
  EXPECT_EQ(kept.peak, 100u);
  EXPECT_EQ(kept.seconds, 4);
  const ScheduleCost replayed = simulate(chain, {{0, 1, {{0, 1}}}, {1, 2}});
  // Beside the chain's result, two gradients, and what the backward has made.
  EXPECT_EQ(replayed.peak, 3 + 7 + 20u);
  EXPECT_EQ(replayed.seconds, 4 + 1);
}

TEST(ChainProgramme, ALossTakesWhatItTakesBesideAnInputThatItsBlockKeeps) {
  std::vector<BlockProfile> chain(2);
  chain[0].output = chain[0].gradient = chain[0].forward_peak = 100;
  chain[1].output = chain[1].gradient = 1;
  chain[1].saved = 10;
  chain[1].peak_before_loss = 30;
  chain[1].forward_peak = 80;
  EXPECT_EQ(simulate(chain, plain_schedule(2)).peak, 100 + 30u);
  chain[1].forward_peak = 140;
  EXPECT_EQ(simulate(chain, plain_schedule(2)).peak, 140u);
  chain[1].saves_input = true;
  EXPECT_EQ(simulate(chain, plain_schedule(2)).peak, 100 + 140u);
}

TEST(ChainProgramme, OfHalfCopiesThoseStandThatTheBackwardNeeds) {
  std::vector<BlockProfile> chain(2);
  chain[0].output = chain[0].gradient = chain[1].output = chain[1].gradient = 1;
  chain[0].cached = 100;
  chain[0].cached_and_kept = 30;
  chain[1].forward_peak = 20;
  chain[1].backward_peak = 61;
  EXPECT_EQ(simulate(chain, plain_schedule(2)).peak, 100 + 1 + 20u);
  chain[1].backward_peak = 201;
  EXPECT_EQ(simulate(chain, plain_schedule(2)).peak, 30 + 2 + 200u);
}

TEST(MergedChain, NeighboursTakeWhatTheyTakeOneAfterTheOther) {
  std::vector<BlockProfile> chain(2);
  chain[0].forward_seconds = 1;
  chain[0].backward_seconds = 2;
  chain[0].saved = 10;
  chain[0].output = 20;
  chain[0].light_peak = 100;
  chain[0].forward_peak = 200;
  chain[0].backward_peak = 50;
  chain[1].forward_seconds = 3;
  chain[1].backward_seconds = 4;
  chain[1].saved = 5;
  chain[1].output = 2;
  chain[1].light_peak = 90;
  chain[1].forward_peak = 40;
  chain[1].replay_peak = 31;
  chain[1].backward_peak = 60;
  const MergedChain merged(chain, 1);
  ASSERT_EQ(merged.blocks().size(), 1u);
  const BlockProfile& both = merged.blocks()[0];
  EXPECT_EQ(both.forward_seconds, 4);
  EXPECT_EQ(both.backward_seconds, 6);
  EXPECT_EQ(both.saved, 10u + 20 + 5);
  EXPECT_EQ(both.output, 2u);
  EXPECT_EQ(both.light_peak, 20u + 90);     // beside the first one's result
  EXPECT_EQ(both.forward_peak, 200u);       // the first one's
  EXPECT_EQ(both.replay_peak, 200u);        // which runs whole
  EXPECT_EQ(both.backward_peak, 30u + 60);  // beside all that the first keeps
}

// ---- An oracle: every schedule, written out and walked through

std::vector<BlockProfile> random_chain(std::mt19937& random, int n) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % (high - low + 1));
  };
  std::vector<BlockProfile> chain(static_cast<std::size_t>(n));
  for (BlockProfile& b : chain) {
    b.forward_seconds = draw(1, 9);
    b.backward_seconds = draw(1, 9);
    b.output = draw(1, 4);
    b.gradient = b.output;
    b.lead = draw(0, 3);
    b.saved = draw(0, 6);
    b.saves_output = true;
    b.light_peak = b.output + draw(0, 3);
    b.forward_peak = b.output + b.saved + draw(0, 3);
    b.replay_peak = draw(static_cast<int>(b.saved), static_cast<int>(b.forward_peak));
    b.backward_peak = b.output + b.saved + b.gradient + b.lead + draw(0, 5);
  }
  return chain;
}

// The same with blocks that may be offloaded, some for little and some for much time.
std::vector<BlockProfile> random_chain_with_offload(std::mt19937& random, int n) {
  std::vector<BlockProfile> chain = random_chain(random, n);
  for (BlockProfile& b : chain) {
    if (random() % 4 == 0) continue;
    b.offloaded = b;
    b.offloaded->forward_seconds += static_cast<double>(random() % 6);
    b.offloaded->backward_seconds += static_cast<double>(random() % 6);
    b.offloaded->saved = random() % (b.saved + 1);
    b.offloaded->backward_peak += random() % 3;
  }
  return chain;
}

// Blocks that may keep a part, for more or less time, and gradients that stay where the backward
// has been.
std::vector<BlockProfile> random_chain_with_ways(std::mt19937& random, int n) {
  std::vector<BlockProfile> chain = random_chain_with_offload(random, n);
  const auto below = [&](double limit) {
    return static_cast<double>(random() % static_cast<unsigned>(limit + 1));
  };
  for (BlockProfile& b : chain) {
    b.parameter_gradients = random() % 3;
    b.backward_peak += b.parameter_gradients;
    if (b.offloaded) b.offloaded->backward_peak += b.parameter_gradients;
    b.tail_seconds = below(b.forward_seconds);
    for (unsigned ways = random() % 3; ways > 0; --ways) {
      SelectiveBlock way{b, std::make_shared<const std::vector<SegmentOperation>>()};
      way.saved = random() % (b.saved + 1);
      way.forward_peak = b.output + way.saved + random() % 3;
      way.replay_peak = way.saved + random() % (b.output + 1);
      way.backward_seconds += below(5);
      way.tail_seconds = below(way.forward_seconds);
      b.selective.push_back(way);
    }
  }
  return chain;
}

// All schedules of the blocks s .. t; outside of segments, blocks may be offloaded.
std::vector<Schedule> all_schedules(const std::vector<BlockProfile>& chain, std::size_t s,
                                    std::size_t t) {
  if (s > t) return {{}};
  std::vector<Schedule> all;
  const auto add = [&](const SchedulePart& head) {
    for (const Schedule& rest : all_schedules(chain, head.end, t)) {
      Schedule schedule{head};
      schedule.insert(schedule.end(), rest.begin(), rest.end());
      all.push_back(schedule);
    }
  };
  add({s, s + 1});
  for (const SelectiveBlock& way : chain[s].selective) add({s, s + 1, {}, false, way.results});
  if (chain[s].offloaded && t + 1 == chain.size()) add({s, s + 1, {}, true});
  for (std::size_t end = s + 1; end <= t; ++end) {  // the last block's backward comes at once
    for (const Schedule& inner : all_schedules(chain, s, end - 1)) add({s, end, inner});
  }
  return all;
}

// The programme's model, plainly: what stands is a sum, each operation needs so much above it.
struct Walk {
  const std::vector<BlockProfile>& chain;
  std::size_t peak = 0;
  double seconds = 0;

  void need(std::size_t bytes) { peak = std::max(peak, bytes); }
  const KeptBlock& kept_as(const SchedulePart& part) const {
    const BlockProfile& block = chain[part.begin];
    for (const SelectiveBlock& way : block.selective) {
      if (way.results == part.results) return way;
    }
    return part.offloaded ? *block.offloaded : block;
  }
  // Of the parameters of the blocks from i on.
  std::size_t gradients_from(std::size_t i) const {
    std::size_t sum = 0;
    for (; i < chain.size(); ++i) sum += chain[i].parameter_gradients;
    return sum;
  }

  // A run of the schedule and the backward through it; `standing` without gradients, `gradient` of
  // the result and what else stands with it. A replay ends with the last tensor that is kept.
  void run(const Schedule& schedule, std::size_t standing, std::size_t gradient) {
    std::vector<std::size_t> before;
    const bool replayed = schedule.back().end < chain.size();
    if (replayed) seconds -= kept_as(schedule.back()).tail_seconds;
    gradient += gradients_from(schedule.back().end);
    for (const SchedulePart& part : schedule) {
      before.push_back(standing);
      if (part.inner.empty()) {
        const KeptBlock& b = kept_as(part);
        const bool ends = replayed && &part == &schedule.back();
        need(standing + gradient + (ends ? b.replay_peak : b.forward_peak));
        seconds += b.forward_seconds;
        standing += b.saved + chain[part.begin].output;
        continue;
      }
      for (std::size_t i = part.begin; i < part.end; ++i) {
        const std::size_t input = i > part.begin ? chain[i - 1].output : 0;
        need(standing + gradient + input + chain[i].light_peak);
        seconds += chain[i].forward_seconds;
      }
      standing += chain[part.end - 1].output;
    }
    for (std::size_t k = schedule.size(); k-- > 0;) {
      const SchedulePart& part = schedule[k];
      if (part.inner.empty()) {
        need(before[k] + kept_as(part).backward_peak + gradients_from(part.end));
        seconds += kept_as(part).backward_seconds;
      } else {
        const BlockProfile& last = chain[part.end - 1];
        run(part.inner, before[k], last.gradient + last.lead);
      }
    }
  }
};

bool offloads(const Schedule& schedule) {
  return std::any_of(schedule.begin(), schedule.end(),
                     [](const SchedulePart& part) { return part.offloaded; });
}
bool keeps_results(const Schedule& schedule) {
  return std::any_of(schedule.begin(), schedule.end(), [](const SchedulePart& part) {
    return part.results != nullptr || keeps_results(part.inner);
  });
}

TEST(ChainProgramme, IsTheBestOfAllSchedulesForEveryAmountOfMemory) {
  std::mt19937 random(7);
  int offloading = 0, selective = 0;
  for (int trial = 0; trial < 180; ++trial) {
    const int n = 1 + trial % (trial < 120 ? 6 : 5);
    const std::vector<BlockProfile> chain = trial < 60    ? random_chain(random, n)
                                            : trial < 120 ? random_chain_with_offload(random, n)
                                                          : random_chain_with_ways(random, n);
    const ChainProgramme programme(chain, 0);
    std::vector<Walk> walks;
    for (const Schedule& schedule : all_schedules(chain, 0, chain.size() - 1)) {
      walks.push_back({chain});
      walks.back().run(schedule, 0, 0);
    }
    for (std::size_t m = 0; m <= programme.steps(); ++m) {
      double best = kNever;
      for (const Walk& walk : walks) {
        if (walk.peak <= m) best = std::min(best, walk.seconds);
      }
      ASSERT_EQ(programme.seconds(m), best) << "trial " << trial << ", " << m << " bytes";
      const auto schedule = programme.schedule(m);
      ASSERT_EQ(schedule.has_value(), best < kNever);
      if (!schedule) continue;
      offloading += offloads(*schedule) ? 1 : 0;
      selective += keeps_results(*schedule) ? 1 : 0;
      Walk walk{chain};
      walk.run(*schedule, 0, 0);
      ASSERT_LE(walk.peak, m);
      ASSERT_EQ(walk.seconds, best);
      // The simulation is never above the programme, but for the gradient that its caller has.
      ASSERT_LE(simulate(chain, *schedule).peak, m + 2 * chain.back().gradient);
      ASSERT_EQ(simulate(chain, *schedule).seconds, best);
    }
  }
  EXPECT_GT(offloading, 100);
  EXPECT_GT(selective, 100);
}

TEST(ChainProgramme, ReversesUniformChainsAsRevolveDoes) {
  // Blocks that are only ever kept at the moment of their backward, and activations of one byte:
  // the fewest further runs forward of n blocks from c stored activations are those of Griewank and
  // Walther's Revolve, r n - beta(c + 1, r - 1), where beta(c, r) = (c + r)! / (c! r!) and r is the
  // least with beta(c, r) >= n.
  const auto beta = [](int c, int r) {
    double result = 1;
    for (int i = 1; i <= r; ++i) result = result * (c + i) / i;
    return result;
  };
  BlockProfile block;
  block.forward_seconds = 1;
  block.output = 1;
  block.saved = 50;
  for (const int n : {2, 5, 10, 20, 40}) {
    const ChainProgramme programme(std::vector<BlockProfile>(n, block), 0);
    for (int c = 1; c <= n; ++c) {
      int r = 0;
      while (beta(c, r) < n) ++r;
      EXPECT_EQ(programme.seconds(static_cast<std::size_t>(c)), n + r * n - beta(c + 1, r - 1))
          << n << " blocks, " << c << " activations";
    }
  }
}

TEST(ChainProgramme, FindsMoreForLongChainsThanSegmentsOfEqualLength) {
  // Of 260 blocks that keep two bytes each, 200 bytes hold 100: segments of equal length keep the
  // last one whole and no more, the programme all that fits.
  BlockProfile block;
  block.forward_seconds = 1;
  block.output = block.gradient = 1;
  block.light_peak = block.forward_peak = 1;
  block.saved = 1;
  block.backward_peak = 3;
  const std::vector<BlockProfile> chain(260, block);
  const ScheduleChoice choice({chain}, 0);
  const CostedSchedule* best = choice.fastest(200);
  ASSERT_NE(best, nullptr);
  EXPECT_LE(best->cost.peak, 200u);
  EXPECT_EQ(simulate(chain, best->schedule).seconds, best->cost.seconds);
  double segments = kNever;
  for (std::size_t length = 1; length < chain.size(); ++length) {
    Schedule schedule;
    for (std::size_t i = 0; i < chain.size(); i += length) {
      const std::size_t end = std::min(i + length, chain.size());
      Schedule inner;
      for (std::size_t k = i; k < end; ++k) inner.push_back({k, k + 1});
      if (end == chain.size()) {
        schedule.insert(schedule.end(), inner.begin(), inner.end());
      } else {
        schedule.push_back({i, end, inner});
      }
    }
    const ScheduleCost cost = simulate(chain, schedule);
    if (cost.peak <= 200) segments = std::min(segments, cost.seconds);
  }
  EXPECT_LT(best->cost.seconds, segments - 50);
}

}  // namespace
}  // namespace cairn::checkpointing::planner
