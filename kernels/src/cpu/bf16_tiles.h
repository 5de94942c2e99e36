// Products of small bf16 matrices that lie in the caches, on the processor's bf16 instructions: no
// library call is as short as such a product.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/half.h"

namespace cairn::kernels::cpu {

/// y [m, n] = a b, or y += a b, in f32. a [m, k] is row-major. b is [k / 2, n] pairs: a word holds
/// rows 2 i (low half) and 2 i + 1 of a column. m, n and k are multiples of 32; leading dimensions
/// count elements of a and y, words of b.
struct Bf16Product {
  std::int64_t m, n, k;
  const core::BFloat16* a;
  std::int64_t lda;
  const std::uint32_t* b;
  std::int64_t ldb;
  float* y;
  std::int64_t ldy;
  bool accumulate;
};

/// One way to compute them. A thread calls begin(), then run() any number of times, then end().
struct Bf16Tiles {
  void (*begin)();
  void (*run)(const Bf16Product& product);
  void (*end)();
};

/// Those that this processor (and ONEDNN_MAX_CPU_ISA) allows.
std::vector<const Bf16Tiles*> all_bf16_tiles();
/// The fastest; null where none is faster than products in f32.
const Bf16Tiles* bf16_tiles();

}  // namespace cairn::kernels::cpu
