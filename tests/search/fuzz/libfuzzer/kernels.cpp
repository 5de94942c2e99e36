// What the readers ask of kernels, element by element: the backends need libraries of vendors,
// which no sanitizer sees.
#include "cairn/kernels/copy.h"

#include <cstdint>
#include <cstring>
#include <vector>

namespace cairn::kernels {
namespace {

/// f(offset of an element, in elements) for each, in the order of the shape.
template <class F>
void for_each_offset(const TensorView& x, F&& f, int dimension = 0, std::int64_t offset = 0) {
  if (dimension == x.shape.dims()) return f(offset);
  for (std::int64_t i = 0; i < x.shape[dimension]; ++i)
    for_each_offset(x, f, dimension + 1, offset + i * x.strides[dimension]);
}

}  // namespace

/// Of bytes, which say where a tensor has been filled.
void fill(const TensorView& y, double value) {
  for_each_offset(y, [&](std::int64_t offset) {
    static_cast<std::uint8_t*>(y.data)[offset] = static_cast<std::uint8_t>(value);
  });
}

/// Of one dtype.
void copy(const TensorView& x, const TensorView& y) {
  const auto size = static_cast<std::int64_t>(core::size_of(x.dtype));
  std::vector<std::int64_t> from;
  for_each_offset(x, [&](std::int64_t offset) { from.push_back(offset); });
  auto next = from.begin();
  for_each_offset(y, [&](std::int64_t offset) {
    std::memcpy(static_cast<char*>(y.data) + offset * size,
                static_cast<const char*>(x.data) + *next++ * size, static_cast<std::size_t>(size));
  });
}

}  // namespace cairn::kernels
