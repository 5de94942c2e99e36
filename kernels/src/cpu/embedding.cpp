// embedding: rows copied. Its backward sorts the occurrences by row, so that each row of dweight is
// summed by one thread, in order of occurrence, in f32 (f64), and rounded once.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/rows.h"

namespace cairn::kernels {

namespace {

std::vector<std::int64_t> checked_indices(const char* op, const TensorView& index,
                                          std::int64_t rows) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(index.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = index.as<std::int64_t>()[static_cast<std::int64_t>(i) * index.strides[0]];
    CAIRN_CHECK(values[i] >= 0 && values[i] < rows, op, "expected indices in 0..", rows - 1,
                ", got ", values[i], " at position ", i);
  }
  return values;
}

/// Occurrences of one row: order[begin .. end).
struct RowRun {
  std::size_t begin, end;
};

template <class T>
auto widened(T x) {
  if constexpr (std::is_same_v<T, double>)
    return x;
  else
    return static_cast<float>(x);
}

template <class T, class W>
void add_rows(const cpu::Rows& dy, const std::int64_t* order, std::int64_t count, W* row,
              bool accumulate, std::vector<double>& sum) {
  const std::int64_t width = dy.width();
  sum.assign(static_cast<std::size_t>(width), 0.0);
  for (std::int64_t k = 0; k < count; ++k) {
    const T* from = dy.row<T>(order[k]);
    for (std::int64_t i = 0; i < width; ++i) sum[static_cast<std::size_t>(i)] += widened(from[i]);
  }
  for (std::int64_t i = 0; i < width; ++i) {
    const double before = accumulate ? double{widened(row[i])} : 0.0;
    row[i] = W(static_cast<decltype(widened(W{}))>(before + sum[static_cast<std::size_t>(i)]));
  }
}

}  // namespace

void CpuBackend::embedding(View weight, View index, View y) const {
  const std::vector<std::int64_t> indices = checked_indices("embedding", index, weight.shape[0]);
  const cpu::Rows from(weight, cpu::Access::read), to(y, cpu::Access::write);
  const std::size_t bytes = static_cast<std::size_t>(to.width()) * core::size_of(y.dtype);
  core::parallel_for(
      to.count(), cpu::row_grain(to.width()), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          std::memcpy(to.row(i), from.row(indices[static_cast<std::size_t>(i)]), bytes);
        }
      });
  to.finish();
}

void CpuBackend::embedding_backward(View dy, View index, View dweight, bool accumulate) const {
  const std::vector<std::int64_t> indices =
      checked_indices("embedding_backward", index, dweight.shape[0]);
  if (!accumulate) fill(dweight, 0.0);
  if (dy.numel() == 0) return;
  if (dweight.shape[1] > 1 && dweight.strides[1] != 1) {  // rows must be contiguous: work on a copy
    const Tensor dense = Tensor::empty(dweight.shape, dweight.dtype, dweight.device);
    copy(dweight, dense);
    embedding_backward(dy, index, dense, true);
    copy(dense, dweight);
    return;
  }
  std::vector<std::int64_t> order(indices.size());
  std::iota(order.begin(), order.end(), 0);
  const auto row_of = [&](std::int64_t n) { return indices[static_cast<std::size_t>(n)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return row_of(a) < row_of(b); });
  std::vector<RowRun> segments;
  for (std::size_t k = 0; k < order.size(); ++k) {
    if (k == 0 || row_of(order[k]) != row_of(order[k - 1])) segments.push_back({k, k});
    segments.back().end = k + 1;
  }
  const cpu::Rows from(dy, cpu::Access::read);
  core::dispatch_floating(dy.dtype, "embedding_backward", [&](auto t) {
    core::dispatch_floating(dweight.dtype, "embedding_backward", [&](auto w) {
      using W = decltype(w);
      core::parallel_for(static_cast<std::int64_t>(segments.size()), cpu::row_grain(from.width()),
                         [&](std::int64_t begin, std::int64_t end) {
                           std::vector<double> sum;
                           for (std::int64_t k = begin; k < end; ++k) {
                             const RowRun s = segments[static_cast<std::size_t>(k)];
                             W* row = dweight.as<W>() + row_of(order[s.begin]) * dweight.strides[0];
                             add_rows<decltype(t)>(from, order.data() + s.begin,
                                                   static_cast<std::int64_t>(s.end - s.begin), row,
                                                   accumulate, sum);
                           }
                         });
    });
  });
}

}  // namespace cairn::kernels
