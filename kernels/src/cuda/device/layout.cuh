// Where element i of several equally shaped, strided operands lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cairn/core/shape.h"
#include "cuda/device/simt.h"

namespace cairn::kernels::cuda {

__device__ __forceinline__ std::int64_t divide(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) == 0) {  // 32-bit division is several times faster
    return static_cast<std::int64_t>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b));
  }
  return a / b;
}

__device__ __host__ inline std::int64_t smaller(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}

/// Dimensions run from the innermost outwards.
template <int Operands>
struct Layout {
  int dims = 0;
  std::int64_t size[core::kMaxDims] = {};
  std::int64_t stride[Operands][core::kMaxDims] = {};

  struct Offsets {
    std::int64_t of[Operands];
  };
  __device__ Offsets offsets(std::int64_t i) const {
    Offsets result{};
    for (int d = 0; d < dims; ++d) {
      const std::int64_t outer = d + 1 < dims ? divide(i, size[d]) : 0;
      const std::int64_t coordinate = i - outer * size[d];
      SIMT_UNROLL
      for (int k = 0; k < Operands; ++k) result.of[k] += coordinate * stride[k][d];
      i = outer;
    }
    return result;
  }

  /// Element i of every operand lies at offset i.
  __device__ __host__ bool is_linear() const {
    if (dims > 1) return false;
    for (int k = 0; k < Operands; ++k) {
      if (dims == 1 && size[0] > 1 && stride[k][0] != 1) return false;
    }
    return true;
  }
  /// On the host: adds a dimension outside those there are; joins it to the last where every
  /// operand allows.
  void push_outer(std::int64_t n, const std::int64_t (&strides)[Operands]) {
    if (n == 1) return;
    bool joins = dims > 0;
    for (int k = 0; joins && k < Operands; ++k) {
      joins = strides[k] == stride[k][dims - 1] * size[dims - 1];
    }
    if (joins) {
      size[dims - 1] *= n;
      return;
    }
    size[dims] = n;
    for (int k = 0; k < Operands; ++k) stride[k][dims] = strides[k];
    ++dims;
  }
};

/// Turns a layout of elements into one of packs of N, where all operands lie so: unit stride
/// inside, whole packs along it, and packs that start at multiples of N. False (and unchanged)
/// elsewhere.
template <int N, int Operands>
bool take_packs(Layout<Operands>& layout) {
  if (layout.dims == 0 || layout.size[0] % N != 0) return false;
  for (int k = 0; k < Operands; ++k) {
    if (layout.stride[k][0] != 1) return false;
    for (int d = 1; d < layout.dims; ++d) {
      if (layout.stride[k][d] % N != 0) return false;
    }
  }
  layout.size[0] /= N;
  for (int k = 0; k < Operands; ++k) layout.stride[k][0] = N;
  return true;
}

/// Whether element i means the i-th in row-major order of the shape, or any order (then memory
/// order of operand 0 is taken).
enum class Visit { any_order, row_major };

template <int Operands>
Layout<Operands> make_layout(const core::Shape& shape,
                             const core::Strides* const (&strides)[Operands], Visit visit) {
  int order[core::kMaxDims];
  for (int d = 0; d < shape.dims(); ++d) order[d] = shape.dims() - 1 - d;
  if (visit == Visit::any_order) {
    std::stable_sort(order, order + shape.dims(),
                     [&](int a, int b) { return (*strides[0])[a] < (*strides[0])[b]; });
  }
  Layout<Operands> layout;
  for (int i = 0; i < shape.dims(); ++i) {
    std::int64_t at[Operands];
    for (int k = 0; k < Operands; ++k) at[k] = (*strides[k])[order[i]];
    layout.push_outer(shape[order[i]], at);
  }
  return layout;
}

}  // namespace cairn::kernels::cuda
