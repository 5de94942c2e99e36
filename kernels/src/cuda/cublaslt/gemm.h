// One strided-batched product through cuBLASLt, in row-major terms: y = epilogue(alpha a b + beta y
// + bias).
#pragma once

#include <compare>
#include <cstdint>

#include "cairn/kernels/matmul.h"
#include "cuda/queue.h"

namespace cairn::kernels::cuda {

/// A matrix in memory: row-major with `ld` elements from row to row, or, transposed, from column to
/// column.
struct GemmMatrix {
  bool transposed = false;
  std::int64_t ld = 1;
  std::int64_t batch_stride = 0;
  DType dtype = DType::f32;
  int alignment = 16;  // of its address, in bytes, at most 16

  auto operator<=>(const GemmMatrix&) const = default;
};

/// All that the choice of an algorithm depends on.
struct GemmShape {
  int device = 0;
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  GemmMatrix a, b, y;
  int bias = 0;  // [n] of y's dtype: the alignment of its address, in bytes, at most 256; 0: none
  bool accumulate = false;
  Activation activation = Activation::none;
  bool tf32 = false;  // f32 inputs may be rounded to TF32

  auto operator<=>(const GemmShape&) const = default;
};

struct GemmPointers {
  const void* a;
  const void* b;
  void* y;
  const void* bias;
  double alpha;
};

/// False where cuBLASLt has no algorithm for the shape; throws DeviceError where a call fails.
bool gemm(const Queue& queue, const GemmShape& shape, const GemmPointers& pointers);

}  // namespace cairn::kernels::cuda
