#include "cairn/data/drawn_digits.h"

#include "cairn/core/parallel_for.h"
#include "digit_pen.h"

namespace cairn::data {

namespace {

using detail::kDigitSide;

constexpr std::int64_t kGrain = 64;  // images one thread draws at least: about a millisecond

TensorDataset draw(std::uint64_t seed, std::int64_t count) {
  CAIRN_CHECK(count >= 0, "drawn_digits", "expected a count >= 0, got ", count);
  TensorDataset set(Tensor::empty({count, 1, kDigitSide, kDigitSide}, DType::u8, Device{}),
                    Tensor::empty({count}, DType::i64, Device{}));
  auto* pixels = set.inputs().data<std::uint8_t>();
  auto* labels = set.labels().data<std::int64_t>();
  core::parallel_for(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto image = static_cast<std::uint64_t>(i);
      const int digit = detail::digit_of(seed, image);
      labels[i] = digit;
      detail::draw_digit(seed, image, digit, pixels + i * kDigitSide * kDigitSide);
    }
  });
  return set;
}

}  // namespace

DrawnDigits::DrawnDigits(std::uint64_t seed, std::int64_t count)
    : TensorDataset(draw(seed, count)) {}

Tensor DrawnDigits::images() const {
  return inputs().alias(inputs().view().reshape({size(), kDigitSide, kDigitSide}));
}

}  // namespace cairn::data
