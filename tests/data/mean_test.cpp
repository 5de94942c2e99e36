// data::Mean against all values in one list.
#include "cairn/data/mean.h"

#include <condition_variable>
#include <limits>
#include <mutex>
#include <random>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/data/loader.h"
#include "support.h"

namespace cairn::data::testing {
namespace {

/// Ranks that are threads, and wait for each other.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), values_(static_cast<std::size_t>(size)) {}
  World world(int rank) {
    return {rank, size_, [this, rank](const std::string& value, std::string_view) {
              std::unique_lock lock(mutex_);
              values_[static_cast<std::size_t>(rank)] = value;
              const std::int64_t round = arrived_++ / size_;
              all_.notify_all();
              all_.wait(lock, [&] { return arrived_ >= (round + 1) * size_; });
              std::vector<std::string> got = values_;
              ++left_;
              all_.notify_all();
              all_.wait(lock, [&] { return left_ >= (round + 1) * size_; });
              return got;
            }};
  }

 private:
  int size_;
  std::mutex mutex_;
  std::condition_variable all_;
  std::vector<std::string> values_;
  std::int64_t arrived_ = 0, left_ = 0;
};

template <class Body>
void on_ranks(int size, Body body) {
  Meeting meeting(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { body(meeting.world(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Sample i is the number i * i.
TensorDataset squares(std::int64_t size) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < size; ++i) values.push_back(static_cast<double>(i * i));
  return TensorDataset(Tensor::from(values, {size, 1}, DType::f32),
                       Tensor::zeros({size}, DType::i64));
}

// The evaluation of the documentation: each sample once, whatever the ranks and the batches.
TEST(Mean, OverRanksIsTheMeanOfTheWholeDataset) {
  for (const std::int64_t size : {1, 2, 7, 30, 31}) {
    const TensorDataset set = squares(size);
    double expected = 0.0;
    for (std::int64_t i = 0; i < size; ++i) {
      expected += static_cast<double>(i * i) / static_cast<double>(size);
    }
    for (const int world : {1, 2, 3, 4}) {
      for (const std::int64_t batch_size : {1, 4, 100}) {
        std::vector<double> means(static_cast<std::size_t>(world));
        on_ranks(world, [&](const World& here) {
          DistributedSampler sampler(size, {.world = here, .shuffle = false, .exact = true});
          DataLoader loader(set, sampler, {.batch_size = batch_size, .workers = 0});
          Mean mean;
          for (const Batch& batch : loader) {
            double sum = 0.0;
            for (const double value : batch.inputs.to_vector()) sum += value;
            mean.add(sum / static_cast<double>(batch.size()), static_cast<double>(batch.size()));
          }
          means[static_cast<std::size_t>(here.rank)] = mean.over(here, "squares");
        });
        EXPECT_NEAR(means[0], expected, 1e-9 * expected) << size << " on " << world;
        for (const double mean : means) EXPECT_EQ(mean, means[0]);  // the same bits
      }
    }
  }
}

TEST(Mean, WeightsCountAndNothingIsAnError) {
  Mean mean;
  EXPECT_THROW(mean.here(), core::InvalidArgument);
  mean.add(2.0, 3.0);
  mean.add(4.0);
  mean.add(std::numeric_limits<double>::quiet_NaN(), 0.0);  // an empty batch's
  EXPECT_EQ(mean.here(), 2.5);
  EXPECT_EQ(mean.over(World{}, "alone"), 2.5);
  EXPECT_EQ(mean.sum(), 10.0);
  EXPECT_EQ(mean.weights(), 4.0);
  expect_error<core::InvalidArgument>([&] { mean.add(1.0, -1.0); }, {"weight >= 0", "got -1"});
  EXPECT_THROW(mean.add(1.0, std::numeric_limits<double>::infinity()), core::InvalidArgument);
  on_ranks(3, [](const World& world) {
    expect_error<core::InvalidArgument>([&] { Mean().over(world, "nothing"); }, {"on any rank"});
    Mean one;
    if (world.rank == 1) one.add(7.0);
    EXPECT_EQ(one.over(world, "one"), 7.0);
  });
}

}  // namespace
}  // namespace cairn::data::testing
