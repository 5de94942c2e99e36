// topk and cumsum: each row by one thread.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/rows.h"
#include "math/ranked.h"

namespace cairn::kernels {

namespace {

template <class T>
void top_of_row(const T* x, std::int64_t count, std::int64_t* index, std::int64_t k, bool largest) {
  using Value = typename Ranked<T>::Value;
  std::vector<Ranked<T>> row(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto element =
        static_cast<std::conditional_t<core::is_half(core::dtype_of<T>), float, T>>(x[i]);
    row[static_cast<std::size_t>(i)] = {static_cast<Value>(element), i};
  }
  const auto before = [largest](const Ranked<T>& a, const Ranked<T>& b) {
    return comes_before(a, b, largest);
  };
  std::partial_sort(row.begin(), row.begin() + k, row.end(), before);
  for (std::int64_t i = 0; i < k; ++i) index[i] = row[static_cast<std::size_t>(i)].place;
}

template <class T>
void running_sums(const T* x, T* y, std::int64_t count, bool reverse) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = reverse ? count - 1 - i : i;
    if constexpr (core::is_half(core::dtype_of<T>)) {
      sum += static_cast<float>(x[at]);
      y[at] = T(static_cast<float>(sum));
    } else {
      sum += x[at];
      y[at] = static_cast<T>(sum);
    }
  }
}

}  // namespace

void CpuBackend::topk(View x, View index, bool largest) const {
  const cpu::Rows from(x, cpu::Access::read), to(index, cpu::Access::write);
  core::dispatch_all(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    core::parallel_for(from.count(), cpu::row_grain(from.width()),
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t i = begin; i < end; ++i) {
                           top_of_row(from.row<const T>(i), from.width(), to.row<std::int64_t>(i),
                                      to.width(), largest);
                         }
                       });
  });
  to.finish();
}

void CpuBackend::cumsum(View x, View y, bool reverse) const {
  const cpu::Rows from(x, cpu::Access::read), to(y, cpu::Access::write);
  core::dispatch_floating(x.dtype, "cumsum", [&](auto zero) {
    using T = decltype(zero);
    core::parallel_for(from.count(), cpu::row_grain(from.width()),
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t i = begin; i < end; ++i) {
                           running_sums(from.row<const T>(i), to.row<T>(i), from.width(), reverse);
                         }
                       });
  });
  to.finish();
}

}  // namespace cairn::kernels
