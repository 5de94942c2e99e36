// The hash of hash_tensors: every 8-byte word of a tensor is mixed with its place, and the results
// are added, so that chunks may be added in any order. The mixing function is the finaliser of
// splitmix64 (Steele, Lea & Flood 2014), constants by D. Stafford ("Mix13").
#pragma once

#include <cstdint>

#include "cairn/core/half.h"

namespace cairn::kernels {

class WordHash {
 public:
  /// Of the word at `place` (words from the tensor's start).
  static CAIRN_HOST_DEVICE std::uint64_t of(std::uint64_t word, std::int64_t place) {
    return mix(word + (static_cast<std::uint64_t>(place) + 1) * kGolden);
  }
  /// Of a tensor, from the sum over its words.
  static CAIRN_HOST_DEVICE std::uint64_t finish(std::uint64_t sum, std::int64_t bytes) {
    return mix(sum ^ (static_cast<std::uint64_t>(bytes) * kGolden));
  }
  /// The first n <= 8 bytes as a word, little-endian, with zeros for the others.
  static CAIRN_HOST_DEVICE std::uint64_t load(const unsigned char* bytes, std::int64_t n) {
    std::uint64_t word = 0;
    for (std::int64_t i = 0; i < n; ++i) word |= std::uint64_t{bytes[i]} << (8 * i);
    return word;
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio

  static CAIRN_HOST_DEVICE std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
};

}  // namespace cairn::kernels
