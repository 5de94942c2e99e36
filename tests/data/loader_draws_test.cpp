// The random numbers of samples: the same whoever reads them, and none of the consumer's.
#include <algorithm>
#include <map>
#include <vector>

#include "cairn/core/generator.h"
#include "cairn/data/loader.h"
#include "loader_support.h"
#include "support.h"

namespace cairn::data::testing {
namespace {

// Sample i is three random numbers.
class Noise : public Dataset {
 public:
  explicit Noise(std::int64_t size) : size_(size) {}
  std::int64_t size() const override { return size_; }
  SampleSpec spec() const override { return {{3}, DType::f32, {}, DType::i64}; }
  void read(std::int64_t index, const TensorView& input, const TensorView& label) const override {
    const Tensor draws = Tensor::empty({3});
    Generator::current().fill_uniform(draws, 0, 1);
    Generator::current().fill_uniform(draws, 0, draws.data<float>()[0]);
    std::copy_n(draws.data<float>(), 3, input.as<float>());
    *label.as<std::int64_t>() = index;
  }

 private:
  std::int64_t size_;
};

using Draws = std::map<std::int64_t, std::vector<double>>;  // by sample

void add_draws(Draws& all, const Batch& batch) {
  const std::vector<double> values = batch.inputs.to_vector();
  for (std::size_t i = 0; i < batch.indices.size(); ++i) {
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(3 * i);
    all[batch.indices[i]] = {first, first + 3};
  }
}

Draws draws_of_an_epoch(DataLoader& loader) {
  Draws all;
  for (const Batch& batch : loader) add_draws(all, batch);
  return all;
}

// What the header promises: a generator of its own for (seed, epoch, sample).
Draws expected_draws(std::uint64_t seed, std::uint64_t epoch, std::int64_t size) {
  Draws all;
  const Noise set(size);
  const Tensor input = Tensor::empty({3}), label = Tensor::empty({}, DType::i64);
  const Generator before = Generator::current();
  for (std::int64_t i = 0; i < size; ++i) {
    const auto key = core::philox(seed, epoch, static_cast<std::uint64_t>(i));
    manual_seed(key[0] * (std::uint64_t{1} << 32) + key[1]);
    set.read(i, input, label);
    all[i] = input.to_vector();
  }
  Generator::current() = before;
  return all;
}

TEST(DataLoader, DrawsTheSameForASampleWhoeverReadsIt) {
  const Noise set(40);
  for (const Threads threads : kThreads) {
    for (const std::int64_t batch_size : {1, 7}) {
      RandomSampler sampler(40, 5);
      DataLoader loader(
          set, sampler,
          {.batch_size = batch_size, .workers = threads.workers, .prefetch = threads.prefetch});
      const Draws first = draws_of_an_epoch(loader), second = draws_of_an_epoch(loader);
      EXPECT_EQ(first, expected_draws(5, 0, 40));
      EXPECT_EQ(second, expected_draws(5, 1, 40));
      for (std::int64_t i = 0; i < 40; ++i) EXPECT_NE(first.at(i), second.at(i));
    }
  }
}

TEST(DataLoader, DrawsTheSameOnAnyNumberOfRanks) {
  const Noise set(41);
  Draws all;
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler sampler(41, {.world = rank_of(rank, 3), .seed = 6});
    DataLoader loader(set, sampler, {.batch_size = 4});
    all.merge(draws_of_an_epoch(loader));
  }
  EXPECT_EQ(all, expected_draws(6, 0, 41));
}

TEST(DataLoader, DrawsGoOnWhereAStateWasSaved) {
  const Noise set(40);
  RandomSampler killed(40, 5);
  killed.next_epoch();
  DataLoader first(set, killed, {.batch_size = 4, .workers = 2});
  Draws all;
  for (const Batch& batch : first) {
    add_draws(all, batch);
    if (all.size() == 16) break;
  }
  RandomSampler resumed(40, 99);  // the saved seed wins
  resumed.load_state_dict(killed.state_dict());
  DataLoader rest(set, resumed, {.batch_size = 6, .workers = 0});
  all.merge(draws_of_an_epoch(rest));
  EXPECT_EQ(all, expected_draws(5, 1, 40));
}

TEST(DataLoader, LeavesTheConsumersGeneratorAlone) {
  Noise noise(8);
  Numbers damaged(8);
  damaged.throws_at = 5;
  manual_seed(3);
  Generator::current().next();
  for (const Dataset* set : {static_cast<Dataset*>(&noise), static_cast<Dataset*>(&damaged)}) {
    SequentialSampler sampler(8);
    DataLoader loader(*set, sampler, {.batch_size = 4, .workers = 0});
    try {
      collect(loader);
    } catch (const core::DataError&) {
    }
    EXPECT_EQ(Generator::current().seed(), 3u);
    EXPECT_EQ(Generator::current().offset(), 1u);
  }
}

}  // namespace
}  // namespace cairn::data::testing
