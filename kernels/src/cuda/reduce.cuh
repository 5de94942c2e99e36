// Reductions over any set of dimensions: x seen as [M kept, R reduced], every element read once.
//
// Rows (the reduced elements lie closer together than the kept ones): a block an output. Columns
// (the kept lie closer): a block of 32 outputs x 8 lines, or, where the kept lie in whole packs, of
// 8 packs x 32 lines. Where there are few outputs, R is split over blocks, and the parts are added
// in order. How R is split depends on the shape alone, so results are the same bits on every device
// and in every run. A thread adds eight elements in float, everything beyond in double: long sums
// keep their digits.
#pragma once

#include <limits>

#include "cairn/kernels/elementwise.h"
#include "cuda/column_sums.cuh"
#include "cuda/device/any.cuh"
#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

inline constexpr int kColumns = 32, kLines = 8;  // of a column block

struct ReduceStep {
  ReductionKind op;

  template <class A>
  __device__ A identity() const {
    if (op != ReductionKind::max) return A(0);
    if constexpr (std::is_same_v<A, std::int64_t>) {
      return std::numeric_limits<A>::lowest();
    } else {
      return -std::numeric_limits<A>::infinity();
    }
  }
  template <class A>
  __device__ A operator()(A a, A b) const {
    if (op != ReductionKind::max) return a + b;
    if constexpr (std::is_same_v<A, std::int64_t>) {
      return a > b ? a : b;
    } else {
      return math::max(a, b);
    }
  }
};

/// What sums of an arithmetic type are kept in.
template <class A>
using TotalOf = std::conditional_t<std::is_same_v<A, float>, double, A>;

/// One thread's share.
template <class A>
class Accumulator {
 public:
  using Total = TotalOf<A>;
  __device__ explicit Accumulator(ReduceStep step)
      : step_(step), part_(step.template identity<A>()), total_(step.template identity<Total>()) {}

  __device__ void add(A value) {
    part_ = step_(part_, value);
    if (++count_ == 8) flush();
  }
  __device__ Total total() {
    flush();
    return total_;
  }

 private:
  __device__ void flush() {
    total_ = step_(total_, static_cast<Total>(part_));
    part_ = step_.template identity<A>();
    count_ = 0;
  }
  ReduceStep step_;
  A part_;
  Total total_;
  int count_ = 0;
};

/// x [M, R] through two layouts; y of any dtype.
template <class T>
struct ReduceTask {
  using Total = TotalOf<Arithmetic<T>>;
  const T* x;
  void* y;
  DType y_dtype;
  Layout<2> kept;     // offsets in x and y
  Layout<1> reduced;  // offsets in x
  std::int64_t outputs, length, split_length;
  int splits;
  ReduceStep step;
  bool accumulate;
  Total* partial;  // [splits, M] where splits > 1

  __device__ void finish(std::int64_t output, Total value) const {
    const std::int64_t at = kept.offsets(output).of[1];
    if (step.op == ReductionKind::mean) {
      store(at, static_cast<double>(value) / static_cast<double>(length));
    } else {
      store(at, value);
    }
  }
  template <class V>  // std::int64_t or double
  __device__ void store(std::int64_t at, V value) const {
    if constexpr (std::is_same_v<V, std::int64_t>) {
      if (accumulate) value += convert_any<std::int64_t>(load_any(y, y_dtype, at));
      store_any(y, y_dtype, at, {false, 0.0, value});
    } else {
      if (accumulate) value += convert_any<V>(load_any(y, y_dtype, at));
      store_any(y, y_dtype, at, {true, value, 0});
    }
  }
  __device__ void put(std::int64_t output, int split, Total value) const {
    if (splits == 1) {
      finish(output, value);
    } else {
      partial[split * outputs + output] = value;
    }
  }
};

template <class T>
__device__ void add_linear(const T* x, std::int64_t n, Accumulator<Arithmetic<T>>& sum) {
  constexpr int N = pack_width<T>;
  visit_row<N>(
      n, elements_to_alignment(x, n), [&](std::int64_t i) { sum.add(widen(x[i])); },
      [&](std::int64_t i) {
        const auto pack = load_pack<N>(x + i);
        SIMT_UNROLL
        for (int k = 0; k < N; ++k) sum.add(widen(pack[k]));
      });
}

template <class T>
__global__ void reduce_rows_kernel(ReduceTask<T> task) {
  using Total = TotalOf<Arithmetic<T>>;
  const std::int64_t blocks = task.outputs * task.splits;
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t output = divide(block, task.splits);
    const int split = static_cast<int>(block - output * task.splits);
    const std::int64_t begin = split * task.split_length;
    const std::int64_t end = smaller(begin + task.split_length, task.length);
    const T* const x = task.x + task.kept.offsets(output).of[0];
    Accumulator<Arithmetic<T>> sum(task.step);
    if (task.reduced.is_linear()) {
      add_linear(x + begin, end - begin, sum);
    } else {
      for (std::int64_t r = begin + threadIdx.x; r < end; r += blockDim.x) {
        sum.add(widen(x[task.reduced.offsets(r).of[0]]));
      }
    }
    const Total total = block_reduce(sum.total(), task.step, task.step.template identity<Total>());
    if (threadIdx.x == 0) task.put(output, split, total);
  }
}

template <class T>
__global__ void reduce_columns_kernel(ReduceTask<T> task) {
  using Total = TotalOf<Arithmetic<T>>;
  SIMT_SHARED(Total, lines, kColumns * kLines);
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int line = static_cast<int>(threadIdx.x) / kColumns;
  const std::int64_t blocks = (task.outputs + kColumns - 1) / kColumns * task.splits;
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t tile = divide(block, task.splits);
    const int split = static_cast<int>(block - tile * task.splits);
    const std::int64_t output = tile * kColumns + column;
    const std::int64_t begin = split * task.split_length;
    const std::int64_t end = smaller(begin + task.split_length, task.length);
    Accumulator<Arithmetic<T>> sum(task.step);
    if (output < task.outputs) {
      const T* const x = task.x + task.kept.offsets(output).of[0];
      for (std::int64_t r = begin + line; r < end; r += kLines) {
        sum.add(widen(x[task.reduced.offsets(r).of[0]]));
      }
    }
    Total value = sum.total();
    lines[threadIdx.x] = value;
    __syncthreads();
    if (line == 0 && output < task.outputs) {
      for (int k = 1; k < kLines; ++k) value = task.step(value, lines[k * kColumns + column]);
      task.put(output, split, value);
    }
    __syncthreads();
  }
}

/// One thread's share of N columns.
template <class A, int N>
class PackAccumulator {
 public:
  using Total = TotalOf<A>;
  __device__ explicit PackAccumulator(ReduceStep step) : step_(step) {
    for (int k = 0; k < N; ++k) {
      part_[k] = step.template identity<A>(), total_[k] = step.template identity<Total>();
    }
  }
  template <class T>
  __device__ void add(const Packed<T, N>& values) {
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) part_[k] = step_(part_[k], widen(values[k]));
    if (++count_ == 8) flush();
  }
  __device__ Packed<Total, N>& totals() {
    flush();
    return total_;
  }

 private:
  __device__ void flush() {
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) {
      total_[k] = step_(total_[k], static_cast<Total>(part_[k]));
      part_[k] = step_.template identity<A>();
    }
    count_ = 0;
  }
  ReduceStep step_;
  Packed<A, N> part_;
  Packed<Total, N> total_;
  int count_ = 0;
};

/// Outputs of a block of packs.
template <class T>
inline constexpr int pack_columns = kRowThreads* pack_width<T>;

template <class T>
__global__ void reduce_pack_columns_kernel(ReduceTask<T> task) {
  constexpr int N = pack_width<T>;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t tiles = (task.outputs + pack_columns<T> - 1) / pack_columns<T>;
  for (std::int64_t block = blockIdx.x; block < tiles * task.splits; block += gridDim.x) {
    const std::int64_t tile = divide(block, task.splits);
    const int split = static_cast<int>(block - tile * task.splits);
    const std::int64_t first = tile * pack_columns<T>, begin = split * task.split_length;
    const std::int64_t output = first + thread % kRowThreads * N;
    const std::int64_t end = smaller(begin + task.split_length, task.length);
    PackAccumulator<Arithmetic<T>, N> sums(task.step);
    if (output < task.outputs) {
      const T* const x = task.x + task.kept.offsets(output).of[0];
      const auto row = [&](std::int64_t r) { return x + task.reduced.offsets(r).of[0]; };
      for (std::int64_t r = begin + thread / kRowThreads; r < end; r += 2 * kRowLines) {
        const bool more = r + kRowLines < end;  // two loads on their way at once
        const auto one = load_pack<N>(row(r)), other = load_pack<N>(row(more ? r + kRowLines : r));
        sums.add(one);
        if (more) sums.add(other);
      }
    }
    const auto total = join_lines(sums.totals(), true, task.step);
    if (thread < pack_columns<T> && first + thread < task.outputs) {
      task.put(first + thread, split, total);
    }
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
