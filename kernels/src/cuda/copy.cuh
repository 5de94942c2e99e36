// Copies and fills. Equal dtypes move as plain words of their size; floating dtypes convert in
// compiled pairs; conversions that involve integers go through one kernel that looks at both dtypes
// at run time.
#pragma once

#include "cuda/device/any.cuh"
#include "cuda/device/layout.cuh"

namespace cairn::kernels::cuda {

template <class Word>
struct Constant {
  Word value;
  __device__ Word operator()() const { return value; }
};

template <class Word>
struct Same {
  __device__ Word operator()(Word x) const { return x; }
};

template <class X, class Y>
struct Convert {
  __device__ Y operator()(X x) const { return narrow<Y>(widen(x)); }
};

/// Rows whose elements lie side by side, `x_row` and `y_row` elements apart.
struct RowCopy {
  std::int64_t rows, columns, x_row, y_row;
};
constexpr int kCopiesAhead = 8;  // loads of a thread that are on their way together

template <class Word>
__global__ void copy_rows_kernel(RowCopy of, const Word* x, Word* y) {
  const std::int64_t width = std::int64_t{blockDim.x} * kCopiesAhead;
  const std::int64_t pieces = (of.columns + width - 1) / width;
  for (std::int64_t piece = blockIdx.x; piece < of.rows * pieces; piece += gridDim.x) {
    const std::int64_t row = divide(piece, pieces);
    const std::int64_t begin = (piece - row * pieces) * width + threadIdx.x;
    Word words[kCopiesAhead];
    SIMT_UNROLL
    for (int k = 0; k < kCopiesAhead; ++k) {
      const std::int64_t column = begin + std::int64_t{k} * blockDim.x;
      if (column < of.columns) words[k] = x[row * of.x_row + column];
    }
    SIMT_UNROLL
    for (int k = 0; k < kCopiesAhead; ++k) {
      const std::int64_t column = begin + std::int64_t{k} * blockDim.x;
      if (column < of.columns) y[row * of.y_row + column] = words[k];
    }
  }
}

static __global__ void convert_any_kernel(std::int64_t n, Layout<2> layout, const void* x,
                                          DType from, void* y, DType to) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const auto at = layout.offsets(i);
    store_any(y, to, at.of[0], load_any(x, from, at.of[1]));
  }
}

}  // namespace cairn::kernels::cuda
