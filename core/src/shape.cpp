#include "cairn/core/shape.h"

#include <ostream>

namespace cairn::core {

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.dims(); ++i) out << (i > 0 ? ", " : "") << shape[i];
  return out << ']';
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  std::uint64_t step = 1;  // wraps for sizes beyond 64 bits, which allocation refuses by name
  for (int i = shape.dims() - 1; i >= 0; --i) {
    strides[i] = static_cast<std::int64_t>(step);
    step *= static_cast<std::uint64_t>(std::max<std::int64_t>(shape[i], 1));
  }
  return strides;
}

Strides channels_last_strides(const Shape& shape) {
  CAIRN_CHECK(shape.dims() == 4, "channels_last_strides",
              "expected 4 dimensions [N, C, H, W], got ", shape);
  const Strides nhwc = contiguous_strides({shape[0], shape[2], shape[3], shape[1]});
  return {nhwc[0], nhwc[3], nhwc[1], nhwc[2]};
}

Shape broadcast_shapes(const Shape& a, const Shape& b, const char* where) {
  const Shape& longer = a.dims() >= b.dims() ? a : b;
  const Shape& shorter = a.dims() >= b.dims() ? b : a;
  Shape result = longer;
  const int skip = longer.dims() - shorter.dims();
  for (int i = 0; i < shorter.dims(); ++i) {
    const std::int64_t x = longer[skip + i];
    const std::int64_t y = shorter[i];
    CAIRN_CHECK(x == y || x == 1 || y == 1, where, "expected shapes that broadcast, got ", a,
                " and ", b, " (sizes must be equal or 1, aligned at the last dimension)");
    result[skip + i] = x == 1 ? y : x;
  }
  return result;
}

int wrap_dim(int dim, int dims, const char* where) {
  CAIRN_CHECK(dim >= -dims && dim < dims, where, "expected a dimension from ", -dims, " to ",
              dims - 1, ", got ", dim);
  return dim < 0 ? dim + dims : dim;
}

}  // namespace cairn::core
