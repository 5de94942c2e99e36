// Crops and flips against windows cut by hand, and the same samples whoever reads them.
#include "cairn/data/transforms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
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

// Of bytes, three planes.
std::vector<double> jittered(const ColorJitterOptions& options, const std::vector<double>& image,
                             int pixels) {
  const Tensor x = Tensor::from(image, {3, 1, pixels}, DType::u8);
  color_jitter(options)(x.view());
  return x.to_vector();
}

TEST(ColorJitter, BrightnessIsAFactorOfAllPixels) {
  manual_seed(3);
  const std::vector<double> image{10, 20, 200, 100, 0, 40};
  double lowest = 2, highest = 0;
  for (int draw = 0; draw < 200; ++draw) {
    const auto seen = jittered({.brightness = 0.25}, image, 2);
    const double factor = (seen[2] + 0.5) / 200;
    lowest = std::min(lowest, factor);
    highest = std::max(highest, factor);
    for (std::size_t i = 0; i < image.size(); ++i)
      ASSERT_NEAR(seen[i], std::min(255.0, factor * image[i]), 1.0) << i;
  }
  EXPECT_NEAR(lowest, 0.75, 0.02);
  EXPECT_NEAR(highest, 1.25, 0.02);
}

TEST(ColorJitter, ContrastKeepsTheMeanGrey) {
  manual_seed(3);
  const std::vector<double> grey{100, 140, 100, 140, 100, 140};  // of mean 120
  double lowest = 100, highest = 0;
  for (int draw = 0; draw < 200; ++draw) {
    const auto seen = jittered({.contrast = 0.5}, grey, 2);
    ASSERT_NEAR(seen[0] + seen[1], 240, 2);
    lowest = std::min(lowest, seen[1] - seen[0]);
    highest = std::max(highest, seen[1] - seen[0]);
  }
  EXPECT_NEAR(lowest, 20, 2);
  EXPECT_NEAR(highest, 60, 2);
}

TEST(ColorJitter, SaturationKeepsEachPixelsGrey) {
  manual_seed(3);
  const std::vector<double> image{200, 90, 90, 90, 90, 90};  // red and grey
  const auto grey = [](double r, double g, double b) { return 0.2989 * r + 0.587 * g + 0.114 * b; };
  std::set<double> reds;
  for (int draw = 0; draw < 50; ++draw) {
    const auto seen = jittered({.saturation = 0.4}, image, 2);
    ASSERT_NEAR(grey(seen[0], seen[2], seen[4]), grey(200, 90, 90), 2);
    for (const std::size_t i : {1, 3, 5}) ASSERT_NEAR(seen[i], 90, 1);
    reds.insert(seen[0]);
  }
  EXPECT_GT(reds.size(), 10u);
  EXPECT_EQ(jittered({}, image, 2), image);
}

TEST(ColorJitter, RefusesWhatItCannotChange) {
  expect_error<core::InvalidArgument>([] { color_jitter({.contrast = -1}); }, {"got -1"});
  const Transform change = color_jitter({.brightness = 0.5});
  for (const Tensor& x :
       {Tensor::empty({1, 4, 4}, DType::u8), Tensor::empty({3, 4, 4}, DType::f32)})
    expect_error<core::InvalidArgument>([&] { change(x.view()); }, {"[3, H, W]"});
}

}  // namespace
}  // namespace cairn::data::testing
