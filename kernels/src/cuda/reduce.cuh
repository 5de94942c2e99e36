// Reductions over any set of dimensions: x seen as [M kept, R reduced], every element read once.
//
// Rows (the reduced elements lie closer together than the kept ones): a block an output. Columns
// (the kept lie closer): a block of 32 outputs x 8 lines. Where there are few outputs, R is split
// over blocks, and the parts are added in order. How R is split depends on the shape alone, so
// results are the same bits on every device and in every run.
#pragma once

#include <limits>

#include "cairn/kernels/elementwise.h"
#include "cuda/device/any.cuh"
#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

inline constexpr int kColumns = 32, kLines = 8;  // of a column block

template <class A>
struct ReduceStep {
  ReduceOp op;
  __device__ A identity() const {
    if (op != ReduceOp::max) return A(0);
    if constexpr (std::is_same_v<A, std::int64_t>)
      return std::numeric_limits<A>::lowest();
    else
      return -std::numeric_limits<A>::infinity();
  }
  __device__ A operator()(A a, A b) const {
    if (op != ReduceOp::max) return a + b;
    if constexpr (std::is_same_v<A, std::int64_t>)
      return a > b ? a : b;
    else
      return math::max(a, b);
  }
};

/// x [M, R] through two layouts; y of any dtype.
template <class T>
struct ReduceTask {
  using A = Arithmetic<T>;
  using Real = std::conditional_t<std::is_same_v<A, float>, float, double>;
  const T* x;
  void* y;
  DType y_dtype;
  Layout<2> kept;     // offsets in x and y
  Layout<1> reduced;  // offsets in x
  std::int64_t outputs, length, split_length;
  int splits;
  ReduceStep<A> step;
  bool accumulate;
  A* partial;  // [splits, M] where splits > 1

  __device__ void finish(std::int64_t output, A value) const {
    const std::int64_t at = kept.offsets(output).of[1];
    if (step.op == ReduceOp::mean) {
      store(at, static_cast<Real>(value) / static_cast<Real>(length));
    } else {
      store(at, value);
    }
  }
  template <class V>
  __device__ void store(std::int64_t at, V value) const {
    if constexpr (std::is_same_v<V, std::int64_t>) {
      if (accumulate) value += convert_any<std::int64_t>(load_any(y, y_dtype, at));
      store_any(y, y_dtype, at, {false, 0.0, value});
    } else {
      if (accumulate) value += convert_any<V>(load_any(y, y_dtype, at));
      store_any(y, y_dtype, at, {true, static_cast<double>(value), 0});
    }
  }
  __device__ void put(std::int64_t output, int split, A value) const {
    if (splits == 1) {
      finish(output, value);
    } else {
      partial[split * outputs + output] = value;
    }
  }
};

template <class T>
__device__ Arithmetic<T> reduce_linear(const T* x, std::int64_t n,
                                       const ReduceStep<Arithmetic<T>>& step) {
  constexpr int N = pack_width<T>;
  auto value = step.identity();
  visit_row<N>(
      n, elements_to_alignment<N>(x, n), [&](std::int64_t i) { value = step(value, widen(x[i])); },
      [&](std::int64_t i) {
        const auto pack = load_pack<N>(x + i);
        SIMT_UNROLL
        for (int k = 0; k < N; ++k) value = step(value, widen(pack[k]));
      });
  return value;
}

template <class T>
__global__ void reduce_rows_kernel(ReduceTask<T> task) {
  const std::int64_t blocks = task.outputs * task.splits;
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t output = divide(block, task.splits);
    const int split = static_cast<int>(block - output * task.splits);
    const std::int64_t begin = split * task.split_length;
    const std::int64_t end = smaller(begin + task.split_length, task.length);
    const T* const x = task.x + task.kept.offsets(output).of[0];
    auto value = task.step.identity();
    if (task.reduced.is_linear()) {
      value = reduce_linear(x + begin, end - begin, task.step);
    } else {
      for (std::int64_t r = begin + threadIdx.x; r < end; r += blockDim.x) {
        value = task.step(value, widen(x[task.reduced.offsets(r).of[0]]));
      }
    }
    value = block_reduce(value, task.step, task.step.identity());
    if (threadIdx.x == 0) task.put(output, split, value);
  }
}

template <class T>
__global__ void reduce_columns_kernel(ReduceTask<T> task) {
  using A = Arithmetic<T>;
  SIMT_SHARED(A, lines, kColumns * kLines);
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int line = static_cast<int>(threadIdx.x) / kColumns;
  const std::int64_t blocks = (task.outputs + kColumns - 1) / kColumns * task.splits;
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t tile = divide(block, task.splits);
    const int split = static_cast<int>(block - tile * task.splits);
    const std::int64_t output = tile * kColumns + column;
    const std::int64_t begin = split * task.split_length;
    const std::int64_t end = smaller(begin + task.split_length, task.length);
    A value = task.step.identity();
    if (output < task.outputs) {
      const T* const x = task.x + task.kept.offsets(output).of[0];
      for (std::int64_t r = begin + line; r < end; r += kLines) {
        value = task.step(value, widen(x[task.reduced.offsets(r).of[0]]));
      }
    }
    lines[threadIdx.x] = value;
    __syncthreads();
    if (line == 0 && output < task.outputs) {
      for (int k = 1; k < kLines; ++k) value = task.step(value, lines[k * kColumns + column]);
      task.put(output, split, value);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void reduce_splits_kernel(ReduceTask<T> task) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t output = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       output < task.outputs; output += step) {
    auto value = task.partial[output];
    for (int k = 1; k < task.splits; ++k) {
      value = task.step(value, task.partial[k * task.outputs + output]);
    }
    task.finish(output, value);
  }
}

}  // namespace cairn::kernels::cuda
