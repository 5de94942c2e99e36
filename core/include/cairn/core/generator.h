// Counter-based randomness: Philox4x32-10 (Salmon et al., SC 2011). A stream of numbers is (seed,
// offset); drawing advances the offset, so saving two integers saves the generator, and any element
// of a mask can be drawn again without storing the mask.
#pragma once

#include <array>
#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/core/state_dict.h"

namespace cairn::core {

/// Four 32-bit words for counter (offset, index) under key seed.
CAIRN_HOST_DEVICE constexpr std::array<std::uint32_t, 4> philox(std::uint64_t seed,
                                                                std::uint64_t offset,
                                                                std::uint64_t index) {
  std::uint32_t c0 = static_cast<std::uint32_t>(index),
                c1 = static_cast<std::uint32_t>(index >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(offset),
                c3 = static_cast<std::uint32_t>(offset >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0,
                        n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1), c3 = static_cast<std::uint32_t>(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

/// Uniform in [0, 1) with 24 bits.
CAIRN_HOST_DEVICE constexpr float uniform_from_bits(std::uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

/// The numbers of one operation: element i draws philox(seed, offset, i).
struct RandomDraw {
  std::uint64_t seed = 0, offset = 0;
  /// While a Graph is captured: device memory with a seed, which counts instead, and an offset,
  /// which is added. Each replay finds others there.
  const std::uint64_t* base = nullptr;

  CAIRN_HOST_DEVICE RandomDraw resolved() const {
    return base == nullptr ? *this : RandomDraw{base[0], base[1] + offset};
  }
};

class Generator : public Stateful {
 public:
  explicit Generator(std::uint64_t seed = 0) : seed_(seed) {}

  std::uint64_t seed() const { return seed_; }
  std::uint64_t offset() const { return offset_; }
  void set(std::uint64_t seed, std::uint64_t offset = 0) { seed_ = seed, offset_ = offset; }
  /// Takes the next offset for one operation.
  RandomDraw draw();
  /// The same as a number. A graph would repeat it: throws Unsupported while one is captured.
  std::uint64_t next();

  // Fills a CPU tensor of f32 in element order. Same values on every machine (own Box-Muller in
  // double).
  void fill_uniform(const Tensor& x, double low, double high);
  void fill_normal(const Tensor& x, double mean, double stddev);

  StateDict state_dict() const override;  // seed, offset
  void load_state_dict(const StateDict& state) override;

  /// The calling thread's generator: drawn from by dropout and initialisation. Seeded by
  /// manual_seed; each thread has its own.
  static Generator& current();

 private:
  std::uint64_t seed_ = 0;
  std::uint64_t offset_ = 0;
};

/// Seeds the calling thread's generator.
void manual_seed(std::uint64_t seed);

}  // namespace cairn::core

namespace cairn {
using core::Generator;
using core::manual_seed;
}  // namespace cairn
