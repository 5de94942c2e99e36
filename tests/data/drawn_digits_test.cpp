#include "cairn/data/drawn_digits.h"

#include <array>
#include <limits>

#include "cairn/core/parallel_for.h"
#include "cairn/data/idx.h"
#include "real_data.h"
#include "support.h"

namespace cairn::data::testing {
namespace {

constexpr std::int64_t kPixels = 28 * 28;

const std::uint8_t* image(const Tensor& images, std::int64_t i) {
  return images.data<std::uint8_t>() + i * kPixels;
}

// The bits that every machine must draw. Whoever changes the drawing on purpose changes these.
TEST(DrawnDigits, DrawsTheSameBitsEverywhere) {
  const DrawnDigits digits(1, 1000);
  EXPECT_EQ(fnv1a(digits.images()), 11347430541661325427u);
  EXPECT_EQ(fnv1a(digits.labels()), 127811816306894176u);
}

TEST(DrawnDigits, DrawsTheSameBitsOnAnyNumberOfThreads) {
  const int before = core::num_threads();
  core::set_num_threads(1);
  const DrawnDigits one(7, 300);
  core::set_num_threads(4);
  const DrawnDigits four(7, 300);
  core::set_num_threads(before);
  EXPECT_EQ(fnv1a(one.images()), fnv1a(four.images()));
  EXPECT_EQ(fnv1a(one.labels()), fnv1a(four.labels()));
}

TEST(DrawnDigits, AnImageDependsOnSeedAndNumberAlone) {
  const DrawnDigits few(3, 10), many(3, 200), other(4, 10);
  EXPECT_EQ(fnv1a(image(few.images(), 0), 10 * kPixels),
            fnv1a(image(many.images(), 0), 10 * kPixels));
  for (std::int64_t i = 0; i < 10; ++i) {
    EXPECT_NE(fnv1a(image(few.images(), i), kPixels), fnv1a(image(other.images(), i), kPixels));
  }
}

TEST(DrawnDigits, HasMnistsShapeAndBalance) {
  const DrawnDigits digits(1, 5000);
  EXPECT_EQ(digits.images().shape(), (Shape{5000, 28, 28}));
  EXPECT_EQ(digits.images().dtype(), DType::u8);
  EXPECT_EQ(digits.labels().shape(), (Shape{5000}));
  EXPECT_EQ(digits.labels().dtype(), DType::i64);
  EXPECT_EQ(digits.spec().input_shape, (Shape{1, 28, 28}));
  std::array<int, 10> counts{};
  for (std::int64_t label : digits.labels().to_vector<std::int64_t>())
    ++counts.at(static_cast<std::size_t>(label));
  for (int count : counts) EXPECT_NEAR(count, 500, 110);  // 5 deviations of a binomial
}

TEST(DrawnDigits, FillsABoxOf20AndIsCentredByMass) {
  const DrawnDigits digits(2, 500);
  for (std::int64_t i = 0; i < digits.size(); ++i) {
    const std::uint8_t* pixels = image(digits.images(), i);
    double mass = 0, mass_x = 0, mass_y = 0;
    int left = 28, right = -1, top = 28, bottom = -1;
    for (int at = 0; at < kPixels; ++at) {
      const int x = at % 28, y = at / 28;
      mass += pixels[at], mass_x += pixels[at] * x, mass_y += pixels[at] * y;
      if (pixels[at] < 96) continue;  // the soft edge reaches a little beyond the box
      left = std::min(left, x), right = std::max(right, x);
      top = std::min(top, y), bottom = std::max(bottom, y);
    }
    ASSERT_NEAR(mass_x / mass, 14.0, 0.51) << i;
    ASSERT_NEAR(mass_y / mass, 14.0, 0.51) << i;
    const int side = std::max(right - left, bottom - top) + 1;
    ASSERT_GE(side, 18) << i;
    ASSERT_LE(side, 21) << i;
  }
}

TEST(DrawnDigits, MayBeEmptyButNotNegative) {
  EXPECT_EQ(DrawnDigits(1, 0).size(), 0);
  EXPECT_THROW(DrawnDigits(1, -1), core::InvalidArgument);
}

// The share of `images` whose nearest drawn digit (squared distance of pixels) bears their label.
double nearest_neighbour_accuracy(const DrawnDigits& known, const Tensor& images,
                                  const Tensor& labels, std::int64_t count) {
  const auto* known_labels = known.labels().data<std::int64_t>();
  const auto* true_labels = labels.data<std::int64_t>();
  const Tensor known_images = known.images();
  std::int64_t right = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t best = 0;
    int smallest = std::numeric_limits<int>::max();
    for (std::int64_t k = 0; k < known.size(); ++k) {
      const std::uint8_t *a = image(images, i), *b = image(known_images, k);
      int distance = 0;
      for (int at = 0; at < kPixels; ++at) distance += (a[at] - b[at]) * (a[at] - b[at]);
      if (distance < smallest) smallest = distance, best = k;
    }
    right += known_labels[best] == true_labels[i];
  }
  return static_cast<double>(right) / static_cast<double>(count);
}

TEST(DrawnDigits, LookLikeTheirLabels) {
  const DrawnDigits known(1, 2000), unseen(2, 300);
  EXPECT_GE(nearest_neighbour_accuracy(known, unseen.images(), unseen.labels(), 300), 0.93);
}

TEST(DrawnDigits, LookLikeRealHandwriting) {
  const std::string folder = real_data("mnist");
  if (folder.empty()) GTEST_SKIP() << kNoRealData;
  const DrawnDigits known(1, 2000);
  const ImageSet mnist = read_test_folder(folder);
  EXPECT_GE(nearest_neighbour_accuracy(known, mnist.images, mnist.labels, 300), 0.75);
}

}  // namespace
}  // namespace cairn::data::testing
