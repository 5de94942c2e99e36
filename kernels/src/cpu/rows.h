// Views as rows of contiguous elements, for kernels that work along the last dimension.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::kernels::cpu {

enum class Access : std::uint8_t { read, write };

/// A view [..., D] as numel / D rows. Where its layout does not allow it, the rows are a copy;
/// finish() brings what was written back.
class Rows {
 public:
  Rows(const TensorView& view, Access access);

  std::int64_t count() const { return count_; }
  std::int64_t width() const { return width_; }
  DType dtype() const { return view_.dtype; }
  template <class T>
  T* row(std::int64_t i) const {
    return static_cast<T*>(data_) + i * stride_;
  }
  void* row(std::int64_t i) const {
    return static_cast<char*>(data_) +
           i * stride_ * static_cast<std::int64_t>(core::size_of(view_.dtype));
  }
  void finish() const;

 private:
  TensorView view_;
  Tensor copy_;
  Access access_;
  void* data_ = nullptr;
  std::int64_t count_ = 1, width_ = 1, stride_ = 1;
};

/// Elements of a [N] view as double, whatever its dtype and stride.
class Column {
 public:
  explicit Column(const TensorView& view);
  double get(std::int64_t i) const;
  void set(std::int64_t i, double value) const;

 private:
  TensorView view_;
  std::int64_t stride_;
};

/// The elements of a [D] view as A (float or double); `absent` for each where the view is
/// undefined.
template <class A>
std::vector<A> values_or(const TensorView& view, std::int64_t width, A absent);

/// Rows per chunk so that a chunk has about kGrain elements.
std::int64_t row_grain(std::int64_t width);

}  // namespace cairn::kernels::cpu
