// TensorView: memory that somebody else owns, with shape, strides, dtype and device. Kernels take
// views, so a trainer with tensors of its own uses them without copying. A view is a plain value
// and tracks no gradient.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cairn/core/device.h"
#include "cairn/core/dtype.h"
#include "cairn/core/shape.h"

namespace cairn::core {

class WriteCount;

struct TensorView {
  void* data = nullptr;
  Shape shape;
  Strides strides;  // in elements; 0 repeats
  DType dtype = DType::f32;
  Device device;
  /// The storage's count of writes, where the memory is a Tensor's: it must live as long as the
  /// view is written through. Null: nobody counts.
  WriteCount* version = nullptr;

  TensorView() = default;
  TensorView(void* data, Shape shape, Strides strides, DType dtype, Device device = {})
      : data(data), shape(shape), strides(strides), dtype(dtype), device(device) {}
  TensorView(void* data, Shape shape, DType dtype, Device device = {})
      : TensorView(data, shape, contiguous_strides(shape), dtype, device) {}

  bool defined() const { return data != nullptr || shape.dims() > 0; }
  int dims() const { return shape.dims(); }
  std::int64_t size(int dim) const { return shape[wrap_dim(dim, dims(), "size")]; }
  std::int64_t numel() const { return shape.numel(); }
  std::size_t nbytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype); }
  /// The memory as elements of T. Nothing is checked, because kernels dispatch on the dtype first.
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  bool is_contiguous() const;     // row-major and gapless (dimensions of size 1 do not matter)
  bool is_channels_last() const;  // 4 dimensions, stored N H W C and gapless
  bool is_dense() const;          // some permutation of it is contiguous: no gaps, no repeats

  // Other views of the same memory. Each throws InvalidArgument where only a copy could give it.
  TensorView reshape(const Shape& shape) const;  // one size may be -1
  TensorView expand(const Shape& shape) const;   // broadcasting; repeated dimensions get stride 0
  TensorView transpose(int dim0, int dim1) const;
  TensorView permute(const Shape& order) const;
  TensorView slice(int dim, std::int64_t begin, std::int64_t end) const;  // [begin, end)
  TensorView select(int dim, std::int64_t index) const;                   // drops the dimension
  TensorView unsqueeze(int dim) const;
  bool can_reshape(const Shape& shape) const;

  /// Says that the memory is about to be written (Storage::version); whoever looks after it is told
  /// first, and may throw (WriteGuard). Any thread.
  void bump_version() const;
};
static_assert(std::is_trivially_copyable_v<TensorView>);  // device code takes it as an argument

}  // namespace cairn::core

namespace cairn {
using core::TensorView;
}
