// A short list of dimension sizes or strides, held inline.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>

#include "cairn/core/error.h"

namespace cairn::core {

inline constexpr int kMaxDims = 8;

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes) : Shape(sizes.begin(), sizes.end()) {}
  template <class Iterator>
  Shape(Iterator first, Iterator last) {
    for (; first != last; ++first) push_back(*first);
  }
  static Shape filled(int dims, std::int64_t value) {
    Shape shape;
    for (int i = 0; i < dims; ++i) shape.push_back(value);
    return shape;
  }

  int dims() const { return dims_; }
  bool empty() const { return dims_ == 0; }
  std::int64_t operator[](int i) const { return sizes_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return sizes_[static_cast<std::size_t>(i)]; }
  std::int64_t back() const { return sizes_[static_cast<std::size_t>(dims_ - 1)]; }
  const std::int64_t* begin() const { return sizes_.data(); }
  const std::int64_t* end() const { return sizes_.data() + dims_; }
  std::int64_t* begin() { return sizes_.data(); }
  std::int64_t* end() { return sizes_.data() + dims_; }

  void push_back(std::int64_t size) {
    if (dims_ == kMaxDims) fail("shape", "expected at most ", kMaxDims, " dimensions, got more");
    sizes_[static_cast<std::size_t>(dims_++)] = size;
  }
  std::int64_t numel() const {  // 1 for no dimensions
    std::int64_t n = 1;
    for (std::int64_t size : *this) n *= size;
    return n;
  }
  bool operator==(const Shape& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::array<std::int64_t, kMaxDims> sizes_{};
  int dims_ = 0;
};

using Strides = Shape;  // in elements

std::ostream& operator<<(std::ostream& out, const Shape& shape);  // "[2, 3]"

Strides contiguous_strides(const Shape& shape);  // row-major
/// The strides of an image batch that is N C H W in shape and N H W C in memory. Throws
/// InvalidArgument unless there are 4 dimensions.
Strides channels_last_strides(const Shape& shape);
/// The shape that both broadcast to: aligned at the last dimension, two sizes are equal or one of
/// them is 1. Throws InvalidArgument, which names both shapes, where they do not.
Shape broadcast_shapes(const Shape& a, const Shape& b, const char* where);
/// Maps a dimension of -dims..dims-1 to 0..dims-1, as negative ones count from the last. Throws
/// InvalidArgument for any other.
int wrap_dim(int dim, int dims, const char* where);

}  // namespace cairn::core

namespace cairn {
using core::Shape;
using core::Strides;
}  // namespace cairn
