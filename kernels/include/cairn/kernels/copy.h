// Filling and copying views. The rules of elementwise.h hold.
#pragma once

#include <cstddef>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

void fill(const TensorView& y, double value);

/// y = x, converting the dtype; any two layouts of the same shape; across devices too. x broadcasts
/// to y's shape.
void copy(const TensorView& x, const TensorView& y);

/// Bytes of the host's memory that do not overlap, written past the caches by the calling thread:
/// for what nothing reads soon. Faster than memcpy, which reads what it writes over, unless both
/// sides lie in a cache.
void copy_past_caches(const void* from, void* to, std::size_t bytes);

}  // namespace cairn::kernels
