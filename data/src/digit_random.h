// Random numbers for one drawing. Every value is made by integer arithmetic and exact or correctly
// rounded double operations, so that it has the same bits on every machine.
#pragma once

#include <array>
#include <cstdint>

#include "cairn/core/generator.h"

namespace cairn::data::detail {

class DigitRandom {
 public:
  DigitRandom(std::uint64_t seed, std::uint64_t image) : seed_(seed), image_(image) {}

  /// Uniform in [low, high).
  double uniform(double low, double high) { return low + (high - low) * unit(next()[0]); }
  /// A bell around mean: the sum of two uniforms, never further than 2.45 deviations away.
  double bell(double mean, double deviation) {
    const std::array<std::uint32_t, 4> w = next();
    const double sum = unit(w[0]) + unit(w[1]) - 1.0;
    return mean + deviation * (sum * 2.449489742783178);
  }
  int below(int n) {
    return static_cast<int>((std::uint64_t{next()[0]} * static_cast<std::uint64_t>(n)) >> 32);
  }
  bool chance(double probability) { return unit(next()[0]) < probability; }

 private:
  static double unit(std::uint32_t bits) { return static_cast<double>(bits) * 0x1p-32; }
  std::array<std::uint32_t, 4> next() { return core::philox(seed_, image_, draw_++); }

  std::uint64_t seed_;
  std::uint64_t image_;
  std::uint64_t draw_ = 0;
};

/// sin(2 pi turns) by polynomial, within 1e-6: libm's last bits differ between machines, these do
/// not.
double sine_of_turns(double turns);

}  // namespace cairn::data::detail
