// Crops and flips against windows cut by hand, and the same samples whoever reads them.
#include "cairn/data/transforms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "cairn/core/generator.h"
#include "cairn/data/loader.h"
#include "loader_support.h"
#include "support.h"

namespace cairn::data::testing {
namespace {

using Image = std::vector<double>;
constexpr std::int64_t kPlanes = 3, kHeight = 4, kWidth = 5;
const Shape kShape{kPlanes, kHeight, kWidth};

// Each pixel another number, none of them 0.
Tensor numbered(DType dtype) {
  const Tensor image = Tensor::empty(kShape, dtype);
  for (std::int64_t i = 0; i < image.numel(); ++i) {
    if (dtype == DType::u8) {
      image.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i + 1);
    } else {
      image.data<float>()[i] = static_cast<float>(i + 1);
    }
  }
  return image;
}

double pixel(std::int64_t plane, std::int64_t y, std::int64_t x) {
  const bool inside = y >= 0 && y < kHeight && x >= 0 && x < kWidth;
  return inside ? static_cast<double>((plane * kHeight + y) * kWidth + x + 1) : 0.0;
}

template <class F>
Image drawn(F pixel_at) {
  Image image;
  for (std::int64_t plane = 0; plane < kPlanes; ++plane)
    for (std::int64_t y = 0; y < kHeight; ++y)
      for (std::int64_t x = 0; x < kWidth; ++x) image.push_back(pixel_at(plane, y, x));
  return image;
}

// How often the transform makes which image of the numbered one.
std::map<Image, int> outcomes(const Transform& transform, DType dtype, int draws) {
  manual_seed(7);
  std::map<Image, int> count;
  for (int i = 0; i < draws; ++i) {
    const Tensor image = numbered(dtype);
    transform(image.view());
    ++count[image.to_vector()];
  }
  return count;
}

class Images : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Transforms, Images, ::testing::Values(DType::u8, DType::f32));

TEST_P(Images, AreCutAnywhereInThePaddedOneEquallyOften) {
  for (const std::int64_t padding : {0, 1, 2, 6}) {
    const auto side = static_cast<int>(2 * padding + 1), places = side * side, draws = 400 * places;
    std::map<Image, int> expected;
    for (std::int64_t down = -padding; down <= padding; ++down)
      for (std::int64_t right = -padding; right <= padding; ++right)
        ++expected[drawn([&](std::int64_t plane, std::int64_t y, std::int64_t x) {
          return pixel(plane, y + down, x + right);
        })];
    const std::map<Image, int> count =
        outcomes(random_crop({.padding = padding}), GetParam(), draws);
    EXPECT_EQ(count.size(), expected.size()) << padding;
    for (const auto& [image, times] : expected) {
      const auto found = count.find(image);
      ASSERT_NE(found, count.end()) << padding;
      EXPECT_NEAR(found->second, 400 * times, 5 * std::sqrt(400.0 * times)) << padding;
    }
  }
}

TEST_P(Images, AreMirroredAsOftenAsAsked) {
  const Image as_it_was = drawn(pixel),
              mirrored =
                  drawn([](auto plane, auto y, auto x) { return pixel(plane, y, kWidth - 1 - x); });
  using Count = std::map<Image, int>;
  EXPECT_EQ(outcomes(random_horizontal_flip(0), GetParam(), 50), (Count{{as_it_was, 50}}));
  EXPECT_EQ(outcomes(random_horizontal_flip(1), GetParam(), 50), (Count{{mirrored, 50}}));
  for (const double probability : {0.25, 0.5}) {
    Count count = outcomes(random_horizontal_flip(probability), GetParam(), 4000);
    EXPECT_EQ(count.size(), 2u);
    EXPECT_NEAR(count[mirrored], 4000 * probability, 150);
    EXPECT_EQ(count[mirrored] + count[as_it_was], 4000);
  }
}

TEST(Transforms, MirrorAnEvenWidthAndOneRow) {
  const Tensor row = Tensor::from(std::vector<float>{1, 2, 3, 4}, {1, 4});
  random_horizontal_flip(1)(row.view());
  EXPECT_EQ(row.to_vector(), (std::vector<double>{4, 3, 2, 1}));
}

TEST(Transforms, OfAnImageWithoutPixelsDoNothing) {
  for (const Shape& shape : {Shape{1, 0, 3}, Shape{1, 3, 0}, Shape{0, 3, 3}}) {
    const Tensor none = Tensor::empty(shape, DType::u8);
    random_crop({.padding = 2})(none.view());
    random_horizontal_flip(1)(none.view());
  }
}

TEST(Transforms, RefuseWhatMakesNoSense) {
  using core::InvalidArgument;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_error<InvalidArgument>([] { random_crop({.padding = -1}); }, {"[random_crop]", "-1"});
  for (const double probability : {-0.1, 1.5, nan})
    expect_error<InvalidArgument>([&] { random_horizontal_flip(probability); },
                                  {"[random_horizontal_flip]", "0 to 1"});
  const Tensor row = Tensor::zeros({4}), wide = Tensor::zeros({4, 6});
  for (const Transform& transform : {random_crop({.padding = 1}), random_horizontal_flip()}) {
    expect_error<InvalidArgument>([&] { transform(row.view()); }, {"[..., H, W]", "[4]"});
    expect_error<InvalidArgument>([&] { transform(wide.view().slice(1, 0, 3)); }, {"contiguous"});
  }
  const Numbers set(4);
  expect_error<InvalidArgument>(
      [&] {
        TransformedDataset(set, {random_horizontal_flip(), Transform()});
      },
      {"transform 1"});
}

TEST(TransformedDataset, AppliesThemInTheirOrderAndLeavesLabels) {
  const Numbers set(10);
  const auto add_one = [](const TensorView& x) { x.as<float>()[0] += 1; };
  const auto twice = [](const TensorView& x) { x.as<float>()[0] *= 2; };
  const TransformedDataset changed(set, {add_one, twice});
  EXPECT_EQ(changed.size(), 10);
  EXPECT_EQ(changed.spec().input_shape, set.spec().input_shape);
  const Tensor input = Tensor::empty({2}), label = Tensor::empty({}, DType::i64);
  changed.read(3, input.view(), label.view());
  EXPECT_EQ(input.to_vector(), (std::vector<double>{8, 3.5}));
  EXPECT_EQ(label.item(), 30);
}

TEST(TransformedDataset, IsTheSameForAnyWorkersAndAnotherInEachEpoch) {
  std::vector<float> pixels;
  for (int i = 0; i < 60 * 36; ++i) pixels.push_back(static_cast<float>(i + 1));
  const TensorDataset images(Tensor::from(pixels, {60, 1, 6, 6}));
  const TransformedDataset set(images, {random_crop({.padding = 2}), random_horizontal_flip()});
  std::vector<std::vector<Seen>> first;
  for (const Threads threads : kThreads) {
    RandomSampler sampler(60, 5);
    DataLoader loader(set, sampler,
                      {.batch_size = 7, .workers = threads.workers, .prefetch = threads.prefetch});
    const std::vector<std::vector<Seen>> epochs = {collect(loader), collect(loader)};
    if (first.empty()) first = epochs;
    EXPECT_EQ(epochs, first);
  }
  std::map<std::int64_t, Image> of_sample;
  int equal = 0;
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    for (const Seen& batch : first[epoch]) {
      for (std::size_t i = 0; i < batch.indices.size(); ++i) {
        const auto begin = batch.inputs.begin() + static_cast<std::ptrdiff_t>(36 * i);
        const Image image(begin, begin + 36);
        equal += epoch == 1 && of_sample[batch.indices[i]] == image;
        of_sample[batch.indices[i]] = image;
      }
    }
  }
  EXPECT_EQ(of_sample.size(), 60u);
  EXPECT_LE(equal, 10);  // one in 50 by chance
}

}  // namespace
}  // namespace cairn::data::testing
