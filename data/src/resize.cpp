// Pillow's resampling (Resample.c): columns first, then rows, each in fixed point and rounded to
// bytes.
#include <algorithm>
#include <cmath>

#include "picture.h"

namespace cairn::data::detail {

namespace {

/// Bits of a weight, as many as a sum of bytes leaves room for.
constexpr int kFraction = 32 - 8 - 2;

/// What one line of the result is made of.
struct Taps {
  std::int64_t begin = 0;
  std::vector<std::int32_t> weights;
};

std::int32_t fixed(double weight) {
  return static_cast<std::int32_t>(std::lround(weight * (1 << kFraction)));
}

std::uint8_t byte_of(std::int32_t sum) {
  return static_cast<std::uint8_t>(std::clamp(sum >> kFraction, 0, 255));
}

Taps taps_of(std::int64_t line, std::int64_t from, std::int64_t to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to),
               reach = std::max(scale, 1.0), center = (static_cast<double>(line) + 0.5) * scale;
  const auto begin = static_cast<std::int64_t>(std::max(0.0, std::floor(center - reach + 0.5))),
             end = std::min(from, static_cast<std::int64_t>(std::floor(center + reach + 0.5)));
  std::vector<double> weights;
  double sum = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const double distance = std::abs(static_cast<double>(i) - center + 0.5) / reach;
    sum += weights.emplace_back(std::max(0.0, 1 - distance));
  }
  Taps taps{begin, {}};
  for (const double weight : weights) taps.weights.push_back(fixed(weight / sum));
  return taps;
}

std::vector<Taps> taps_of(std::int64_t first, std::int64_t count, std::int64_t from,
                          std::int64_t to) {
  std::vector<Taps> all;
  for (std::int64_t line = first; line < first + count; ++line)
    all.push_back(taps_of(line, from, to));
  return all;
}

/// A row of a picture to planes' rows of `columns.size()` pixels, which lie `stride` apart.
void resize_row(const std::uint8_t* rgb, const std::vector<Taps>& columns, std::uint8_t* out,
                std::int64_t stride) {
  for (std::size_t x = 0; x < columns.size(); ++x) {
    const Taps& taps = columns[x];
    const std::uint8_t* in = rgb + 3 * taps.begin;
    std::int32_t r = 1 << (kFraction - 1), g = r, b = r;
    for (const std::int32_t weight : taps.weights) {
      r += in[0] * weight;
      g += in[1] * weight;
      b += in[2] * weight;
      in += 3;
    }
    out[x] = byte_of(r);
    out[x + static_cast<std::size_t>(stride)] = byte_of(g);
    out[x + static_cast<std::size_t>(2 * stride)] = byte_of(b);
  }
}

/// Rows of `width` bytes, `stride` apart.
void mix_rows(const std::uint8_t* row, const std::vector<std::int32_t>& weights,
              std::int64_t stride, std::int64_t width, std::vector<std::int32_t>& sums,
              std::uint8_t* out) {
  std::fill(sums.begin(), sums.end(), 1 << (kFraction - 1));
  for (const std::int32_t weight : weights) {
    for (std::int64_t x = 0; x < width; ++x) sums[static_cast<std::size_t>(x)] += row[x] * weight;
    row += stride;
  }
  for (std::int64_t x = 0; x < width; ++x) out[x] = byte_of(sums[static_cast<std::size_t>(x)]);
}

}  // namespace

void resize(const Picture& picture, const Window& from, std::int64_t height, std::int64_t width,
            const Window& part, std::uint8_t* planes) {
  const auto columns = taps_of(part.left, part.width, from.width, width),
             rows = taps_of(part.top, part.height, from.height, height);
  // Each row of the window that a row of the result needs, as three rows of planes.
  const std::int64_t first = rows.front().begin,
                     count = rows.back().begin +
                             static_cast<std::int64_t>(rows.back().weights.size()) - first,
                     stride = 3 * part.width;
  std::vector<std::uint8_t> narrow(static_cast<std::size_t>(count * stride));
  for (std::int64_t y = 0; y < count; ++y) {
    const std::int64_t at = ((from.top + first + y) * picture.width + from.left) * 3;
    resize_row(picture.rgb.data() + at, columns, narrow.data() + y * stride, part.width);
  }
  std::vector<std::int32_t> sums(static_cast<std::size_t>(part.width));
  for (std::int64_t plane = 0; plane < 3; ++plane) {
    for (std::int64_t y = 0; y < part.height; ++y) {
      const Taps& taps = rows[static_cast<std::size_t>(y)];
      mix_rows(narrow.data() + plane * part.width + (taps.begin - first) * stride, taps.weights,
               stride, part.width, sums, planes + (plane * part.height + y) * part.width);
    }
  }
}

}  // namespace cairn::data::detail
