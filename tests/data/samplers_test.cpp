#include "cairn/data/samplers.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "support.h"

namespace cairn::data::testing {
namespace {

using Indices = std::vector<std::int64_t>;

struct GoldenLine {
  std::string kind;
  std::vector<std::uint64_t> arguments;
  std::vector<std::uint64_t> values;
};

std::vector<GoldenLine> read_golden() {
  std::ifstream file(CAIRN_TEST_GOLDEN "/distributed_sampler.txt");
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
