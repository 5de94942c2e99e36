#include "cairn/core/shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "cairn/core/dtype.h"
#include "cairn/core/tensor_view.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;

using ::testing::HasSubstr;

TEST(Shape, StridesOfLayouts) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Shape{12, 4, 1}));
  EXPECT_EQ(channels_last_strides({2, 3, 4, 5}), (Shape{60, 1, 15, 3}));
  EXPECT_THROW(channels_last_strides({2, 3}), InvalidArgument);
}

TEST(Shape, Broadcasts) {
  EXPECT_EQ(broadcast_shapes({4, 1, 3}, {5, 1}, "add"), (Shape{4, 5, 3}));
  EXPECT_EQ(broadcast_shapes({}, {2}, "add"), (Shape{2}));
  EXPECT_EQ(broadcast_shapes({0, 1}, {1, 3}, "add"), (Shape{0, 3}));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                broadcast_shapes({2, 3}, {4}, "add");
              }),
              HasSubstr("[add] expected shapes that broadcast, got [2, 3] and [4]"));
}

TEST(Shape, AtMostEightDimensions) {
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), InvalidArgument);
  EXPECT_EQ(wrap_dim(-1, 3, "sum"), 2);
  EXPECT_THROW(wrap_dim(3, 3, "sum"), InvalidArgument);
}

TEST(DType, PromotesToWhatHoldsBoth) {
  EXPECT_EQ(promote(DType::f16, DType::bf16), DType::f32);
  EXPECT_EQ(promote(DType::i64, DType::f16), DType::f16);
  EXPECT_EQ(promote(DType::u8, DType::boolean), DType::u8);
  EXPECT_EQ(promote(DType::i16, DType::u8), DType::i16);
  EXPECT_EQ(promote(DType::i32, DType::i16), DType::i32);
  EXPECT_EQ(parse_dtype("i16"), DType::i16);
  EXPECT_EQ(promote(DType::f32, DType::f64), DType::f64);
  EXPECT_EQ(parse_dtype("bf16"), DType::bf16);
  EXPECT_THAT(message_of<InvalidArgument>([] { parse_dtype("float"); }), HasSubstr("f16, bf16"));
}

// Elements in row-major order by walking every index: the definition that reshape must keep.
std::vector<float> elements(const TensorView& view) {
  std::vector<float> out;
  const Strides steps = contiguous_strides(view.shape);
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    std::int64_t at = 0;
    for (int d = 0; d < view.dims(); ++d) at += i / steps[d] % view.shape[d] * view.strides[d];
    out.push_back(view.as<float>()[at]);
  }
  return out;
}

class View : public ::testing::Test {
 protected:
  View() : values_(24) {
    std::iota(values_.begin(), values_.end(), 0.0f);
    x_ = TensorView(values_.data(), {2, 3, 4}, DType::f32);
  }
  std::vector<float> values_;
  TensorView x_;
};

TEST_F(View, ReshapeKeepsTheElements) {
  const std::vector<TensorView> sources = {x_,
                                           x_.transpose(0, 2),
                                           x_.slice(2, 1, 3),
                                           x_.slice(0, 1, 2),
                                           x_.unsqueeze(1),
                                           x_.permute({2, 0, 1})};
  const std::vector<Shape> targets = {{24},  {6, 4}, {2, 12},    {4, 3, 2}, {2, 1, 3, 2, 2},
                                      {12},  {2, 6}, {1, 12, 1}, {3, 2, 2}, {2, 3, 2, 1},
                                      {6, 2}};
  int reshaped = 0;
  for (const TensorView& source : sources) {
    for (const Shape& target : targets) {
      if (target.numel() != source.numel() || !source.can_reshape(target)) continue;
      EXPECT_EQ(elements(source.reshape(target)), elements(source)) << target;
      ++reshaped;
    }
  }
  EXPECT_GE(reshaped, 20);
}

TEST_F(View, ReshapeInfersAndRejects) {
  EXPECT_EQ(x_.reshape({-1, 4}).shape, (Shape{6, 4}));
  EXPECT_FALSE(x_.transpose(0, 1).can_reshape({24}));
  EXPECT_TRUE(x_.transpose(0, 1).can_reshape({3, 2, 2, 2}));
  EXPECT_THAT(message_of<InvalidArgument>([&] { x_.transpose(0, 1).reshape({24}); }),
              HasSubstr("without a copy"));
  EXPECT_THROW(x_.reshape({5, -1}), InvalidArgument);
  EXPECT_THROW(x_.reshape({-1, -1}), InvalidArgument);
  EXPECT_THROW(x_.reshape({23}), InvalidArgument);
}

TEST_F(View, EmptyAndSingleElementShapes) {
  const TensorView none = x_.slice(1, 2, 2);
  EXPECT_EQ(none.numel(), 0);
  EXPECT_TRUE(none.is_contiguous());
  EXPECT_EQ(none.reshape({0, 7}).shape, (Shape{0, 7}));
  const TensorView one = x_.slice(0, 1, 2).slice(1, 1, 2).slice(2, 1, 2);
  EXPECT_EQ(elements(one.reshape({})), (std::vector<float>{17}));
  EXPECT_EQ(one.reshape({}).reshape({1, 1}).shape, (Shape{1, 1}));
}

TEST_F(View, SliceSelectExpand) {
  EXPECT_EQ(elements(x_.select(1, 2)), (std::vector<float>{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(elements(x_.select(0, 0).select(0, 0).expand({2, 4})),
            (std::vector<float>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_THROW(x_.slice(0, 1, 3), InvalidArgument);
  EXPECT_THROW(x_.select(2, 4), InvalidArgument);
  EXPECT_THROW(x_.expand({2, 5, 4}), InvalidArgument);
  EXPECT_THROW(x_.permute({0, 0, 1}), InvalidArgument);
}

TEST_F(View, Layouts) {
  const TensorView image(values_.data(), {2, 3, 2, 2}, channels_last_strides({2, 3, 2, 2}),
                         DType::f32);
  EXPECT_TRUE(image.is_channels_last());
  EXPECT_TRUE(image.is_dense());
  EXPECT_FALSE(image.is_contiguous());
  EXPECT_FALSE(x_.slice(2, 0, 3).is_dense());
  EXPECT_FALSE(x_.select(0, 0).expand({2, 3, 4}).is_dense());
  EXPECT_TRUE(x_.transpose(0, 2).is_dense());
}

}  // namespace
}  // namespace cairn::core
