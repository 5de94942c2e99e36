// reduce: sums, means and maxima over any dimensions.
//
// The dimension with the smallest stride of x decides. Where it is reduced, each result sums whole
// rows ("across"); where it is kept, rows are added to a row of results ("down"). Long reductions
// are cut into pieces whose size depends on the shape alone, summed apart and combined in order, in
// f64 between pieces: the bits do not depend on the number of threads.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/reduce.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/element.h"
#include "cpu/loop.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

template <class T>
double sum_run(const T* x, std::int64_t n) {
  using V = Compute<T>;
  constexpr std::int64_t kStep = 4 * kLanes<V>;
  const Whole<V> io;
  V a(0.0), b(0.0), c(0.0), d(0.0);
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    a = a + io.load(x + i);
    b = b + io.load(x + i + kLanes<V>);
    c = c + io.load(x + i + 2 * kLanes<V>);
    d = d + io.load(x + i + 3 * kLanes<V>);
  }
  V rest(0.0);
  for_vectors<V>(n - i,
                 [&](auto part, std::int64_t k) HWY_ATTR { rest = rest + part.load(x + i + k); });
  return sum_of((a + b) + (c + d) + rest);
}

template <class T>
double max_run(const T* x, std::int64_t n) {
  using V = Compute<T>;
  const V lowest(-std::numeric_limits<double>::infinity());
  V best = lowest, nan(0.0);
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    const V v = io.keep(io.load(x + i), lowest);
    best = select(v > best, v, best);
    nan = nan + select(v != v, V(1.0), V(0.0));
  });
  return sum_of(nan) > 0 ? std::numeric_limits<double>::quiet_NaN() : double{max_of(best)};
}

double RunTotal(ReductionKind op, DType dtype, const void* x, std::int64_t n) {
  double result = 0.0;
  core::dispatch_floating(dtype, "reduce", [&](auto zero) {
    const auto* p = static_cast<const decltype(zero)*>(x);
    result = op == ReductionKind::max ? max_run(p, n) : sum_run(p, n);
  });
  return result;
}

/// total[i] = total[i] op x[r * stride + i] for each row r.
template <class T, class A>
void add_rows(ReductionKind op, const T* x, std::int64_t rows, std::int64_t stride, A* total,
              std::int64_t n) {
  using V = Compute2<T, A>;
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    V sum = io.load(total + i);
    if (op == ReductionKind::max) {
      for (std::int64_t r = 0; r < rows; ++r) sum = max(io.load(x + r * stride + i), sum);
    } else {
      for (std::int64_t r = 0; r < rows; ++r) sum = sum + io.load(x + r * stride + i);
    }
    io.store(sum, total + i);
  });
}

/// total is f64 for f64 and f32 otherwise.
void AddRows(ReductionKind op, DType dtype, const void* x, std::int64_t rows, std::int64_t stride,
             void* total, std::int64_t n) {
  core::dispatch_floating(dtype, "reduce", [&](auto zero) {
    using T = decltype(zero);
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    add_rows(op, static_cast<const T*>(x), rows, stride, static_cast<A*>(total), n);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(RunTotal);
HWY_EXPORT(AddRows);

namespace {

constexpr std::int64_t kPiece = 16384;   // elements summed in f32 before f64 takes over
constexpr std::int64_t kColumns = 1024;  // results worked on together going down
constexpr std::int64_t kRows = 64;       // rows added in f32 before f64 takes over

/// A set of dimensions of x (some of y too), walked row-major.
struct WalkedDims {
  Shape shape;
  Strides x, y;

  void add(std::int64_t size, std::int64_t x_stride, std::int64_t y_stride) {
    const int last = shape.dims() - 1;
    if (last >= 0 && x[last] == x_stride * size && y[last] == y_stride * size) {
      shape[last] *= size;
      x[last] = x_stride;
      y[last] = y_stride;
    } else {
      shape.push_back(size);
      x.push_back(x_stride);
      y.push_back(y_stride);
    }
  }
  std::int64_t offset(const Strides& strides, std::int64_t index) const {
    std::int64_t at = 0;
    for (int d = shape.dims() - 1; d >= 0; --d) {
      at += index % shape[d] * strides[d];
      index /= shape[d];
    }
    return at;
  }
};

struct Plan {
  WalkedDims kept, reduced;    // without the innermost dimension
  bool inner_reduced = false;  // the dimension with x's smallest stride
  std::int64_t inner = 1, x_stride = 1, y_stride = 0;
};

Plan make_plan(const TensorView& x, const TensorView& y) {
  std::vector<int> dims;
  for (int d = 0; d < x.dims(); ++d) {
    if (x.shape[d] != 1) dims.push_back(d);
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int a, int b) { return x.strides[a] > x.strides[b]; });
  Plan plan;
  const auto is_reduced = [&](int d) { return y.shape[d] == 1; };
  plan.inner_reduced = dims.empty() || is_reduced(dims.back());
  while (!dims.empty() &&
         is_reduced(dims.back()) == plan.inner_reduced) {  // all that merge with the innermost
    const int d = dims.back();
    const std::int64_t y_stride = plan.inner_reduced ? 0 : y.strides[d];
    if (plan.inner == 1) {
      plan.x_stride = x.strides[d];
      plan.y_stride = y_stride;
    } else if (x.strides[d] != plan.x_stride * plan.inner ||
               y_stride != plan.y_stride * plan.inner) {
      break;
    }
    plan.inner *= x.shape[d];
    dims.pop_back();
  }
  for (int d : dims) {
    if (is_reduced(d)) {
      plan.reduced.add(x.shape[d], x.strides[d], 0);
    } else {
      plan.kept.add(x.shape[d], x.strides[d], y.strides[d]);
    }
  }
  return plan;
}

class Reduction {
 public:
  Reduction(ReductionKind op, const TensorView& x, const TensorView& y, bool accumulate)
      : op_(op),
        accumulate_(accumulate),
        x_(x),
        y_(y),
        plan_(make_plan(x, y)),
        count_(x.numel() / std::max<std::int64_t>(y.numel(), 1)),
        compute_(core::is_floating(x.dtype) ? x.dtype : DType::f64) {}

  void run() const {
    if (y_.numel() == 0) return;
    if (x_.numel() == 0) {
      core::parallel_for(y_.numel(), kPiece, [&](std::int64_t begin, std::int64_t end) {
        const Strides strides = core::contiguous_strides(y_.shape);
        WalkedDims all{y_.shape, strides, y_.strides};
        for (std::int64_t i = begin; i < end; ++i) finish(all.offset(all.y, i), 0.0);
      });
    } else if (plan_.inner_reduced) {
      run_across();
    } else {
      run_down();
    }
  }

 private:
  double neutral() const {
    return op_ == ReductionKind::max ? -std::numeric_limits<double>::infinity() : 0.0;
  }
  double combine(double a, double b) const {
    if (op_ != ReductionKind::max) return a + b;
    return a > b || std::isnan(a) ? a : b;
  }
  void finish(std::int64_t at, double total) const {
    if (op_ == ReductionKind::mean) total /= static_cast<double>(count_);
    if (accumulate_) total += cpu::element_at(y_, at);
    cpu::set_element(y_, at, total);
  }

  /// n elements of x from an offset on, contiguous and floating; through `buffer` where they are
  /// not so already.
  const void* run_of(std::int64_t offset, std::int64_t n, std::vector<char>& buffer) const {
    const std::size_t bytes = core::size_of(x_.dtype);
    const char* at = x_.as<char>() + offset * static_cast<std::int64_t>(bytes);
    const bool floating = core::is_floating(x_.dtype);
    if (floating && plan_.x_stride == 1) return at;
    buffer.resize(static_cast<std::size_t>(n) * 8);
    if (floating) {
      cpu::gather({at, Shape{n}, Strides{plan_.x_stride}, bytes}, 0, n, buffer.data());
    } else {
      auto* values = reinterpret_cast<double*>(buffer.data());
      for (std::int64_t i = 0; i < n; ++i)
        values[i] = cpu::element_at(x_, offset + i * plan_.x_stride);
    }
    return buffer.data();
  }

  // Rows of `inner` elements are reduced whole. A piece is some rows, or a part of a long row.
  void run_across() const {
    const std::int64_t rows = plan_.reduced.shape.numel();
    const std::int64_t outputs = plan_.kept.shape.numel();
    const std::int64_t width = std::min(plan_.inner, kPiece);
    const std::int64_t height = std::max<std::int64_t>(1, kPiece / plan_.inner);
    const std::int64_t across = (plan_.inner - 1) / width + 1;
    const std::int64_t pieces = across * ((rows - 1) / height + 1);
    const auto piece_total = [&](std::int64_t output, std::int64_t piece,
                                 std::vector<char>& buffer) {
      const std::int64_t row = piece / across * height, column = piece % across * width;
      const std::int64_t n = std::min(width, plan_.inner - column);
      const std::int64_t start = plan_.kept.offset(plan_.kept.x, output) + column * plan_.x_stride;
      double total = neutral();
      for (std::int64_t r = row; r < std::min(rows, row + height); ++r) {
        const void* run = run_of(start + plan_.reduced.offset(plan_.reduced.x, r), n, buffer);
        total = combine(total, HWY_DYNAMIC_DISPATCH(RunTotal)(op_, compute_, run, n));
      }
      return total;
    };
    if (pieces == 1) {
      const std::int64_t grain = std::max<std::int64_t>(1, cpu::kGrain / (rows * plan_.inner));
      core::parallel_for(outputs, grain, [&](std::int64_t begin, std::int64_t end) {
        std::vector<char> buffer;
        for (std::int64_t k = begin; k < end; ++k) {
          finish(plan_.kept.offset(plan_.kept.y, k), piece_total(k, 0, buffer));
        }
      });
      return;
    }
    std::vector<double> totals(static_cast<std::size_t>(outputs * pieces));
    core::parallel_for(outputs * pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<char> buffer;
      for (std::int64_t k = begin; k < end; ++k) {
        totals[static_cast<std::size_t>(k)] = piece_total(k / pieces, k % pieces, buffer);
      }
    });
    for (std::int64_t k = 0; k < outputs; ++k) {
      double total = neutral();
      for (std::int64_t i = 0; i < pieces; ++i) {
        total = combine(total, totals[static_cast<std::size_t>(k * pieces + i)]);
      }
      finish(plan_.kept.offset(plan_.kept.y, k), total);
    }
  }

  /// Reduces rows [row, row + n) of the columns [column, column + width) of one outer result into
  /// totals.
  void add_rows(std::int64_t output, std::int64_t row, std::int64_t n, std::int64_t column,
                std::int64_t width, double* totals) const {
    std::vector<char> buffer, sums(static_cast<std::size_t>(width) * 8);
    const bool wide = compute_ == DType::f64;
    auto* sums32 = reinterpret_cast<float*>(sums.data());
    auto* sums64 = reinterpret_cast<double*>(sums.data());
    if (wide) {
      std::fill_n(sums64, width, neutral());
    } else {
      std::fill_n(sums32, width, static_cast<float>(neutral()));
    }
    const std::int64_t start = plan_.kept.offset(plan_.kept.x, output) + column * plan_.x_stride;
    // Together where one stride leads from row to row, otherwise one by one.
    const bool together =
        plan_.reduced.shape.dims() == 1 && plan_.x_stride == 1 && core::is_floating(x_.dtype);
    const std::int64_t height = together ? n : 1, stride = together ? plan_.reduced.x[0] : 0;
    for (std::int64_t r = row; r < row + n; r += height) {
      const void* run = run_of(start + plan_.reduced.offset(plan_.reduced.x, r), width, buffer);
      HWY_DYNAMIC_DISPATCH(AddRows)(op_, compute_, run, height, stride, sums.data(), width);
    }
    for (std::int64_t i = 0; i < width; ++i) {
      totals[i] = combine(totals[i], wide ? sums64[i] : double{sums32[i]});
    }
  }

  // Rows of `inner` results each. A piece is kRows rows of kColumns columns.
  void run_down() const {
    const std::int64_t rows = plan_.reduced.shape.numel();
    const std::int64_t across = (plan_.inner - 1) / kColumns + 1;
    const std::int64_t blocks = plan_.kept.shape.numel() * across;
    const std::int64_t width = std::min(plan_.inner, kColumns);
    const std::int64_t pieces = (rows - 1) / kRows + 1;
    std::vector<double> totals(static_cast<std::size_t>(blocks * pieces * width), neutral());
    const auto totals_of = [&](std::int64_t k) { return totals.data() + k * width; };
    const std::int64_t grain =
        std::max<std::int64_t>(1, cpu::kGrain / (std::min(rows, kRows) * width));
    core::parallel_for(blocks * pieces, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k) {
        const std::int64_t block = k / pieces, row = k % pieces * kRows;
        const std::int64_t column = block % across * kColumns;
        add_rows(block / across, row, std::min(kRows, rows - row), column,
                 std::min(kColumns, plan_.inner - column), totals_of(k));
      }
    });
    core::parallel_for(
        blocks, std::max<std::int64_t>(1, cpu::kGrain / (pieces * width)),
        [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t block = begin; block < end; ++block) {
            const std::int64_t column = block % across * kColumns;
            const std::int64_t start =
                plan_.kept.offset(plan_.kept.y, block / across) + column * plan_.y_stride;
            for (std::int64_t i = 0; i < std::min(kColumns, plan_.inner - column); ++i) {
              double total = neutral();
              for (std::int64_t k = 0; k < pieces; ++k)
                total = combine(total, totals_of(block * pieces + k)[i]);
              finish(start + i * plan_.y_stride, total);
            }
          }
        });
  }

  ReductionKind op_;
  bool accumulate_;
  const TensorView& x_;
  const TensorView& y_;
  Plan plan_;
  std::int64_t count_;
  DType compute_;
};

}  // namespace

void CpuBackend::reduce(ReductionKind op, View x, View y, bool accumulate) const {
  Reduction(op, x, y, accumulate).run();
}

}  // namespace cairn::kernels
#endif
