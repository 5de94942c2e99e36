// Which gradients travel together, and when.
#include "reducer/bucket_plan.h"

#include <gmock/gmock.h>

#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using testing::ElementsAre;
using Lists = std::vector<std::vector<std::size_t>>;

/// An f32 gradient of so many bytes, that many bytes behind the others of its run.
Gradient gradient(const char* name, std::size_t expected, std::int64_t bytes, std::size_t run,
                  std::int64_t offset) {
  static float memory[1];
  return {name, TensorView(memory, {bytes / 4}, DType::f32, Device{}), expected, run, offset};
}

Lists planned(const std::vector<Gradient>& gradients, const ReducerOptions& options) {
  Lists all;
  for (const PlannedBucket& bucket : plan_buckets(gradients, options))
    all.push_back(bucket.gradients);
  return all;
}

TEST(BucketPlan, GapsBetweenNeighboursCountInASize) {
  const ReducerOptions options{.first_bucket_bytes = 1000, .bucket_bytes = 1000};
  const auto with_gap = [&](std::int64_t gap) {
    return planned({gradient("a", 0, 400, 0, 0), gradient("b", 1, 400, 0, 400 + gap)}, options);
  };
  EXPECT_EQ(with_gap(100), (Lists{{0, 1}}));
  EXPECT_EQ(with_gap(300), (Lists{{0}, {1}}));
}

TEST(BucketPlan, BucketsGoInTheOrderInWhichTheyAreComplete) {
  const ReducerOptions options{.first_bucket_bytes = 400, .bucket_bytes = 400};
  const std::vector<Gradient> backwards = {
      gradient("a", 2, 400, 0, 0), gradient("b", 1, 400, 0, 400), gradient("c", 0, 400, 0, 800)};
  EXPECT_EQ(planned(backwards, options), (Lists{{2}, {1}, {0}}));
}

TEST(BucketPlan, NeighboursAreOfOneDtype) {
  std::vector<float> memory(12);
  const auto at = [&](const char* name, std::size_t place, DType dtype) {
    return Gradient{name, TensorView(memory.data() + place, {4}, dtype, Device{})};
  };
  std::vector<Gradient> gradients = {at("a", 0, DType::f32), at("b", 4, DType::i32),
                                     at("c", 8, DType::i32)};
  find_runs(gradients, 0);
  EXPECT_EQ(gradients[1].run, 1u);
  EXPECT_EQ(gradients[2].run, 1u);
  EXPECT_EQ(gradients[2].offset, 16);
}

}  // namespace
}  // namespace cairn::parallel
