#include "cairn/core/gradient_slot.h"

#include <gtest/gtest.h>

#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::core {
namespace {

using State = GradientSlot::State;

Tensor leaf_of_two() {
  Tensor leaf = Tensor::zeros({2});
  leaf.set_requires_grad(true);
  return leaf;
}

TEST(GradientSlot, ARunThatThrowsBeforeItWritesLeavesTheGradientOfAnEarlierOne) {
  const Tensor leaf = leaf_of_two();
  GradientSlot& slot = leaf.gradient_slot();
  slot.begin(1, {}, "w");
  slot.adopt(Tensor::from(std::vector<float>{3, 4}, {2}));
  slot.end();
  slot.begin(2, {}, "w");
  slot.abort("out of memory");
  EXPECT_EQ(slot.state(), State::local);
  ASSERT_TRUE(slot.gradient().defined());
  EXPECT_EQ(slot.gradient().to_vector(), (std::vector<double>{3.0, 4.0}));
}

TEST(GradientSlot, ARunThatThrowsLeavesAnEmptyOneEmpty) {
  const Tensor leaf = leaf_of_two();
  GradientSlot& slot = leaf.gradient_slot();
  slot.begin(1, {7, 8.0}, "w");
  slot.adopt(Tensor::from(std::vector<float>{3, 4}, {2}));
  slot.abort("out of memory");
  EXPECT_EQ(slot.state(), State::empty);
  EXPECT_FALSE(slot.memory().defined());
  EXPECT_EQ(slot.scale().scaler, 0u);
}

TEST(GradientSlot, WhatARunDidNotReachIsOfNoScale) {
  const Tensor leaf = leaf_of_two();
  GradientSlot& slot = leaf.gradient_slot();
  slot.begin(1, {7, 8.0}, "w");
  slot.end();
  EXPECT_EQ(slot.state(), State::empty);
  EXPECT_EQ(slot.scale().scaler, 0u);
  EXPECT_EQ(slot.scale().factor, 1.0);
}

}  // namespace
}  // namespace cairn::core
