// Element-wise loops over views of any layout.
//
// A kernel sees plain contiguous runs of elements. Views that share one dense layout (row-major,
// channels-last, ...) are handed over whole; otherwise strided operands are gathered into, and
// scattered from, small buffers that stay in the first-level cache.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels::cpu {

/// An operand of a loop; all have one shape. A view that is read and written appears twice.
struct Operand {
  const TensorView& view;
  bool written;
};
inline Operand in(const TensorView& view) {
  return {view, false};
}
inline Operand out(const TensorView& view) {
  return {view, true};
}

enum class Order : std::uint8_t {
  memory,     // elements in the order of the last operand's memory
  row_major,  // elements in row-major order, so that `first` is the row-major index
};

/// data[k] is operand k's run of n elements; `first` is the index of the run's first element in the
/// loop's order.
using RunKernel = std::function<void(void* const* data, std::int64_t n, std::int64_t first)>;

/// Elements per chunk of a parallel loop: enough to pay for waking a thread.
inline constexpr std::int64_t kGrain = 32768;

/// Bytes of a result from which on it is written past the caches: they could not hold it until it
/// is read.
inline constexpr std::int64_t kStreamedBytes = std::int64_t{64} << 20;

void for_each_run(std::initializer_list<Operand> operands, const RunKernel& kernel,
                  Order order = Order::memory);

/// Copies a run of a strided view of one or more dimensions: elements [first, first + n) of its
/// row-major order.
struct StridedRun {
  const char* data;
  Shape shape;
  Strides strides;      // elements
  std::size_t element;  // bytes: 1, 2, 4 or 8
};
void gather(const StridedRun& from, std::int64_t first, std::int64_t n, void* to);
void scatter(const void* from, std::int64_t first, std::int64_t n, const StridedRun& to);

/// Shape and strides with dimensions of size 1 dropped, the rest ordered by falling stride of the
/// last view (row-major order: kept) and neighbours merged where every view allows it.
struct MergedDims {
  Shape shape;
  std::vector<Strides> strides;  // per view
};
MergedDims merge_dims(std::span<const TensorView* const> views, Order order);

}  // namespace cairn::kernels::cpu
