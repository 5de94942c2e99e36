// What is measured of a block's operations, and what a plan may keep of them.
#include "plan/operation_meter.h"

#include <gtest/gtest.h>

#include "cairn/autograd/ops.h"
#include "support/tensors.h"

namespace cairn::checkpointing {
namespace {

MeteredOperation operation(const char* name, double seconds, std::size_t bytes) {
  return {.operation = {name, 0}, .replay_seconds = seconds, .bytes = bytes};
}

std::vector<std::string> names(const KeptResults& results) {
  std::vector<std::string> all;
  for (const SegmentOperation& kept : *results) all.emplace_back(kept.name);
  return all;
}

TEST(MeteredForward, KeepsNeitherViewsNorWhatTakesHardlyAnyTime) {
  MeteredForward block{.operations = {operation("linear", 0.5, 100), operation("transpose", 0.2, 8),
                                      operation("relu", 0.01, 50), operation("softmax", 0.3, 20),
                                      operation("mask", 0.2, 0)},
                       .seconds = 1};
  block.operations[1].view = true;
  const std::vector<KeptResults> sets = block.selections();
  ASSERT_EQ(sets.size(), 3u);
  EXPECT_TRUE(sets[0]->empty());
  EXPECT_EQ(names(sets[1]), std::vector<std::string>{"softmax"});  // more time for its bytes
  EXPECT_EQ(names(sets[2]), (std::vector<std::string>{"softmax", "linear"}));
}

TEST(MeteredForward, BlocksAreAlikeOfTheSameOperationsAndSizes) {
  const MeteredForward block{.operations = {operation("linear", 0.5, 100)}};
  MeteredForward other{.operations = {operation("linear", 0.1, 100)}};
  EXPECT_TRUE(block.same_operations(other));
  other.operations[0].bytes = 200;
  EXPECT_FALSE(block.same_operations(other));
  other = {.operations = {operation("conv2d", 0.5, 100)}};
  EXPECT_FALSE(block.same_operations(other));
  EXPECT_FALSE(block.same_operations({}));
}

// x [64, 32] f32 by weight [16, 32]: the result's 4,096 bytes, and not the weight's.
TEST(MeteredForward, MeasuresBytesWithoutParameters) {
  const Tensor weight = test::normal_tensor({16, 32}, 1).set_requires_grad(true);
  const Tensor x = test::normal_tensor({64, 32}, 2).set_requires_grad(true);
  const MeteredForward block =
      measure_operations([&](const Tensor& in) { return autograd::linear(in, weight); }, x, 2);
  ASSERT_EQ(block.operations.size(), 1u);
  EXPECT_EQ(block.operations[0].operation.name, "linear");
  EXPECT_EQ(block.operations[0].bytes, 64 * 16 * 4u);
  EXPECT_FALSE(block.operations[0].view);
}

}  // namespace
}  // namespace cairn::checkpointing
