#include "cairn/data/samplers.h"

#include <algorithm>
#include <random>
#include <set>
#include <sstream>

#include "support.h"
#include "support/test_folder.h"

namespace cairn::data::testing {
namespace {

using Indices = std::vector<std::int64_t>;

struct GoldenLine {
  std::string kind;
  std::vector<std::uint64_t> arguments;
  std::vector<std::uint64_t> values;
};

std::vector<GoldenLine> read_golden() {
  std::ifstream file(test::test_folder() + "/data/golden/distributed_sampler.txt");
  std::vector<GoldenLine> lines;
  for (std::string text; std::getline(file, text);) {
    if (text.empty() || text[0] == '#') continue;
    std::istringstream in(text);
    GoldenLine line;
    in >> line.kind;
    for (std::string word; in >> word && word != ":";) line.arguments.push_back(std::stoull(word));
    for (std::string word; in >> word;) line.values.push_back(std::stoull(word));
    lines.push_back(std::move(line));
  }
  return lines;
}

DistributedSampler sampler_of(const std::vector<std::uint64_t>& a) {
  DistributedSampler sampler(static_cast<std::int64_t>(a[0]),
                             {.world = rank_of(static_cast<int>(a[2]), static_cast<int>(a[1])),
                              .shuffle = a[5] != 0,
                              .seed = a[3],
                              .drop_last = a[6] != 0});
  sampler.set_epoch(static_cast<std::int64_t>(a[4]));
  return sampler;
}

TEST(DistributedSampler, EqualsTorchIndexForIndex) {
  int compared = 0;
  for (const GoldenLine& line : read_golden()) {
    if (line.kind != "sampler") continue;
    const DistributedSampler sampler = sampler_of(line.arguments);
    const Indices expected(line.values.begin(), line.values.end());
    ASSERT_EQ(sampler.remaining_indices(), expected) << ::testing::PrintToString(line.arguments);
    ASSERT_EQ(sampler.samples_per_epoch(), static_cast<std::int64_t>(expected.size()));
    ++compared;
  }
  EXPECT_EQ(compared, 980);
}

TEST(TorchRandperm, EqualsTorch) {
  int compared = 0;
  for (const GoldenLine& line : read_golden()) {
    if (line.kind != "randperm") continue;
    const Indices order =
        torch_randperm(static_cast<std::int64_t>(line.arguments[0]), line.arguments[1]);
    EXPECT_EQ(fnv1a(order.data(), order.size() * sizeof(order[0])), line.values.at(0))
        << line.arguments[0];
    ++compared;
  }
  EXPECT_EQ(compared, 5);
  EXPECT_TRUE(torch_randperm(0, 3).empty());
  EXPECT_THROW(torch_randperm(-1, 0), core::InvalidArgument);
}

TEST(SequentialSampler, CountsUp) {
  SequentialSampler sampler(5);
  EXPECT_EQ(sampler.remaining_indices(), (Indices{0, 1, 2, 3, 4}));
  sampler.advance(3);
  EXPECT_EQ(sampler.position(), 3);
  EXPECT_EQ(sampler.remaining_indices(), (Indices{3, 4}));
}

TEST(RandomSampler, IsThePermutationOfSeedPlusEpoch) {
  RandomSampler sampler(100, 7);
  EXPECT_EQ(sampler.remaining_indices(), torch_randperm(100, 7));
  sampler.next_epoch();
  EXPECT_EQ(sampler.remaining_indices(), torch_randperm(100, 8));
}

TEST(Sampler, SetEpochKeepsThePositionOfTheCurrentEpoch) {
  RandomSampler sampler(10, 1);
  sampler.set_epoch(2);
  sampler.advance(4);
  sampler.set_epoch(2);
  EXPECT_EQ(sampler.position(), 4);
  sampler.set_epoch(3);
  EXPECT_EQ(sampler.position(), 0);
  EXPECT_THROW(sampler.set_epoch(-1), core::InvalidArgument);
}

TEST(Sampler, ResumesInTheMiddleOfAnEpochOnEveryRank) {
  StateDict state;
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSamplerOptions options{.world = rank_of(rank, 3), .seed = 5};
    DistributedSampler whole(20, options);
    whole.set_epoch(2);
    const Indices all = whole.remaining_indices();
    whole.advance(4);
    if (rank == 0) state = whole.state_dict();  // rank 0's state serves every rank

    options.seed = 99;  // the saved seed wins
    DistributedSampler resumed(20, options);
    resumed.load_state_dict(state);
    EXPECT_EQ(resumed.epoch(), 2);
    EXPECT_EQ(resumed.position(), 12);
    EXPECT_EQ(resumed.remaining_indices(), Indices(all.begin() + 4, all.end()));
  }
}

TEST(Sampler, AnotherWorldSizeReadsTheRestOfTheEpochOnce) {
  constexpr std::int64_t kSize = 24;
  DistributedSampler first(kSize, {.world = rank_of(1, 4), .seed = 3});
  first.advance(3);  // 12 samples over all ranks
  std::multiset<std::int64_t> rest;
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler resumed(kSize, {.world = rank_of(rank, 3)});
    resumed.load_state_dict(first.state_dict());
    for (std::int64_t index : resumed.remaining_indices()) rest.insert(index);
  }
  const Indices order = torch_randperm(kSize, 3);
  EXPECT_EQ(rest, std::multiset<std::int64_t>(order.begin() + 12, order.end()));
}

// A job's life in one epoch: worlds that come and go, and how often each sample was read.
struct Life {
  std::vector<int> reads;
  std::int64_t last_world = 1;
};

/// Every rank reads batches of that size, in step; after some of them the job goes on with another
/// world, from rank 0's state.
Life live(std::int64_t size, std::mt19937& draw, const DistributedSamplerOptions& chosen) {
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(1, most)(draw); };
  Life life{std::vector<int>(static_cast<std::size_t>(size), 0), 1};
  StateDict state;
  for (bool first = true;; first = false) {
    const int world = up_to(5), batch_size = up_to(4), steps = up_to(6);
    life.last_world = world;
    std::vector<DistributedSampler> ranks;
    for (int rank = 0; rank < world; ++rank) {
      DistributedSamplerOptions options = chosen;
      options.world = rank_of(rank, world);
      ranks.emplace_back(size, options);
      if (first) ranks.back().set_epoch(3);
      if (!first) ranks.back().load_state_dict(state);
    }
    bool ended = false;
    for (int step = 0; step < steps && !ended; ++step) {
      for (DistributedSampler& sampler : ranks) {
        const Indices rest = sampler.remaining_indices();
        EXPECT_EQ(sampler.remaining(), static_cast<std::int64_t>(rest.size()));
        const auto n = std::min<std::int64_t>(batch_size, sampler.remaining());
        for (std::int64_t i = 0; i < n; ++i) {
          ++life.reads[static_cast<std::size_t>(rest[static_cast<std::size_t>(i)])];
        }
        sampler.advance(n);
      }
      for (const DistributedSampler& sampler : ranks) {  // none goes on longer than rank 0
        EXPECT_LE(sampler.remaining(), ranks[0].remaining());
        EXPECT_LE(ranks[0].remaining() - sampler.remaining(), chosen.exact ? 1 : 0);
      }
      ended = ranks[0].remaining() == 0;
    }
    if (ended) return life;
    state = ranks[0].state_dict();
  }
}

TEST(Sampler, AnyWorldsInOneEpochReadEachSampleAsOftenAsTheyPromise) {
  std::mt19937 draw(20261122);
  for (int round = 0; round < 600; ++round) {
    const std::int64_t size = std::uniform_int_distribution<int>(0, 60)(draw);
    const int kind = round % 3;
    const DistributedSamplerOptions options{.shuffle = draw() % 2 == 0,
                                            .seed = draw() % 100,
                                            .drop_last = kind == 1,
                                            .exact = kind == 2};
    const Life life = live(size, draw, options);
    std::int64_t none = 0, extra = 0;
    for (const int reads : life.reads) {
      none += reads == 0 ? 1 : 0;
      extra += std::max(0, reads - 1);
    }
    const std::string what = core::str("round ", round, ", ", size, " samples");
    EXPECT_LT(none, kind == 1 ? life.last_world : 1) << what;
    EXPECT_LT(extra, kind == 0 ? life.last_world : 1) << what;
  }
}

TEST(DistributedSampler, ExactIsTorchsOrderWithoutThePadding) {
  for (std::int64_t size = 0; size <= 13; ++size) {
    for (int world = 1; world <= 6; ++world) {
      const Indices order = torch_randperm(size, 9);
      std::int64_t together = 0;
      for (int rank = 0; rank < world; ++rank) {
        const DistributedSampler sampler(size,
                                         {.world = rank_of(rank, world), .seed = 9, .exact = true});
        Indices expected;
        for (std::int64_t i = rank; i < size; i += world) {
          expected.push_back(order[static_cast<std::size_t>(i)]);
        }
        EXPECT_EQ(sampler.remaining_indices(), expected) << size << " on " << world;
        EXPECT_EQ(sampler.samples_per_epoch(), static_cast<std::int64_t>(expected.size()));
        together += sampler.samples_per_epoch();
      }
      EXPECT_EQ(together, size);
    }
  }
  expect_error<core::InvalidArgument>(
      [] { DistributedSampler(5, {.drop_last = true, .exact = true}); },
      {"[distributed_sampler]", "drop_last or exact, got both"});
}

/// Rank 1 of two, whose rank 0 says of its sampler what `other` would.
std::string error_beside(const DistributedSamplerOptions& other, DistributedSamplerOptions own,
                         std::int64_t size = 10) {
  std::string said;
  DistributedSamplerOptions first = other;
  first.world = World(0, 2, [&](const std::string& value, std::string_view) {
    said = value;
    return std::vector<std::string>{value, value};
  });
  const DistributedSampler sampler(10, first);
  own.world = World(1, 2, [&](const std::string& value, std::string_view) {
    return std::vector<std::string>{said, value};
  });
  try {
    const DistributedSampler beside(size, own);
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(DistributedSampler, RanksMustHaveOneOrder) {
  using ::testing::HasSubstr;
  EXPECT_EQ(error_beside({.seed = 3}, {.seed = 3}), "");
  EXPECT_EQ(error_beside({.shuffle = false, .seed = 3}, {.shuffle = false, .seed = 4}), "");
  EXPECT_THAT(
      error_beside({.seed = 3}, {.seed = 4}),
      HasSubstr(
          "10 samples shuffled by seed 3 on rank 0 and 10 samples shuffled by seed 4 on rank 1"));
  EXPECT_THAT(error_beside({.seed = 3}, {.seed = 3}, 11), HasSubstr("11 samples"));
  EXPECT_THAT(error_beside({.seed = 3}, {.shuffle = false}), HasSubstr("in order on rank 1"));
  EXPECT_THAT(error_beside({.drop_last = true}, {.exact = true}),
              HasSubstr("seed 0, exact on rank 1"));
}

TEST(Sampler, RefusesImpossibleValues) {
  expect_error<core::InvalidArgument>([] { DistributedSampler(5, {.world = rank_of(2, 2)}); },
                                      {"[distributed_sampler]", "0 to 1", "got 2"});
  EXPECT_THROW(DistributedSampler(5, {.world = rank_of(0, 0)}), core::InvalidArgument);
  EXPECT_THROW(SequentialSampler(-1), core::InvalidArgument);
  SequentialSampler sampler(5);
  expect_error<core::InvalidArgument>([&] { sampler.advance(6); }, {"0 to 5", "got 6"});
}

TEST(Sampler, RefusesAForeignStateAndStaysAsItWas) {
  RandomSampler sampler(10, 1);
  sampler.advance(2);
  StateDict broken;
  broken.set("epoch", std::int64_t{3});
  broken.set("position", 1.5);
  broken.set("lr", 0.1);
  expect_error<core::DataError>([&] { sampler.load_state_dict(broken); },
                                {"no integer 'position'", "missing 'seed'", "surplus 'lr'"});
  expect_error<core::DataError>([&] { sampler.load_state_dict(RandomSampler(11, 1).state_dict()); },
                                {"10", "11"});
  expect_error<core::DataError>(
      [&] { sampler.load_state_dict(SequentialSampler(10).state_dict()); }, {"in order"});
  EXPECT_EQ(sampler.epoch(), 0);
  EXPECT_EQ(sampler.position(), 2);
}

}  // namespace
}  // namespace cairn::data::testing
