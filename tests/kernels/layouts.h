// The same values in different memory layouts, and loops over the cases that every kernel must
// take.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "support/tensors.h"

namespace cairn::test {

enum class Layout { row_major, transposed, sliced, channels_last };

inline const char* name(Layout layout) {
  switch (layout) {
    case Layout::row_major:
      return "row-major";
    case Layout::transposed:
      return "transposed";
    case Layout::sliced:
      return "sliced";
    case Layout::channels_last:
      return "channels-last";
  }
  return "";
}

/// Layouts that a shape can have.
inline std::vector<Layout> layouts(const Shape& shape) {
  std::vector<Layout> all{Layout::row_major};
  if (shape.dims() >= 2) all.push_back(Layout::transposed);
  if (shape.dims() >= 1) all.push_back(Layout::sliced);
  if (shape.dims() == 4) all.push_back(Layout::channels_last);
  return all;
}

inline constexpr double kGap = 77.0;  // what the elements between a sliced tensor's rows hold

/// Tensors of every layout, made on the host element by element (not by the kernels under test).
class LaidOut {
 public:
  LaidOut(const std::vector<double>& values, const Shape& shape, DType dtype, Device device,
          Layout layout)
      : layout_(layout), stored_(stored_shape(shape, layout)) {
    std::vector<double> host(static_cast<std::size_t>(stored_.numel()), kGap);
    const TensorView view = look(TensorView(host.data(), stored_, DType::f64));
    each(view, [&, i = std::size_t{0}](std::int64_t at) mutable {
      host[static_cast<std::size_t>(at)] = values[i++];
    });
    whole_ = Tensor::from(host, stored_, dtype, device);
  }
  /// For an output: every element holds the gap's value.
  LaidOut(const Shape& shape, DType dtype, Device device, Layout layout)
      : LaidOut(std::vector<double>(static_cast<std::size_t>(shape.numel()), kGap), shape, dtype,
                device, layout) {}

  TensorView view() const { return look(whole_.view()); }
  operator TensorView() const { return view(); }  // NOLINT
  std::vector<double> values() const { return whole_.alias(view()).to_vector<double>(); }

  /// Whether the elements outside the view are as they were.
  bool gaps_untouched() const {
    std::vector<double> host = whole_.to_vector<double>();
    each(look(TensorView(host.data(), stored_, DType::f64)),
         [&](std::int64_t at) { host[static_cast<std::size_t>(at)] = kGap; });
    const double gap = whole_.dtype() == DType::boolean ? 1.0 : kGap;
    return std::all_of(host.begin(), host.end(), [&](double v) { return v == gap || v == kGap; });
  }

 private:
  static Shape stored_shape(const Shape& shape, Layout layout) {
    Shape stored = shape;
    if (layout == Layout::transposed) std::reverse(stored.begin(), stored.end());
    if (layout == Layout::sliced) stored[shape.dims() - 1] += 3;
    if (layout == Layout::channels_last) stored = Shape{shape[0], shape[2], shape[3], shape[1]};
    return stored;
  }
  TensorView look(const TensorView& whole) const {
    switch (layout_) {
      case Layout::row_major:
        return whole;
      case Layout::transposed: {
        Shape order;
        for (int d = whole.dims() - 1; d >= 0; --d) order.push_back(d);
        return whole.permute(order);
      }
      case Layout::sliced:
        return whole.slice(whole.dims() - 1, 1, whole.shape.back() - 2);
      case Layout::channels_last:
        return whole.permute({0, 3, 1, 2});
    }
    return whole;
  }
  /// Calls f(offset from the whole tensor's start) for each element of a view into it, row-major.
  template <class F>
  void each(const TensorView& view, F f) const {
    const std::int64_t start = layout_ == Layout::sliced ? 1 : 0;
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      std::int64_t rest = i, at = start;
      for (int d = view.dims() - 1; d >= 0; --d) {
        at += rest % view.shape[d] * view.strides[d];
        rest /= view.shape[d];
      }
      f(at);
    }
  }

  Layout layout_;
  Shape stored_;
  Tensor whole_;
};

inline constexpr DType kFloating[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

/// What rounding to the dtype makes of values.
inline std::vector<double> rounded(const std::vector<double>& values, DType dtype) {
  return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, dtype)
      .to_vector<double>();
}

inline std::string describe(const Shape& shape, DType dtype, Layout layout) {
  return core::str(shape, " ", core::name(dtype), " ", name(layout));
}

}  // namespace cairn::test

namespace cairn::kernels {  // where the tests are

using test::describe;
using test::epsilon;
using test::expect_close;
using test::kFloating;
using test::LaidOut;
using test::Layout;
using test::layouts;
using test::random_values;

}  // namespace cairn::kernels
