// Tensors whose values nobody has asked for yet. They have a shape, a dtype and a device, and no
// memory: a model is described before it is there, and each weight is made, or read from a file,
// when it is used, or when its part is cut out of it.
#pragma once

#include <functional>
#include <string>

#include "cairn/core/tensor.h"

namespace cairn::core {

/// Where the values of a deferred tensor come from.
struct DeferredValues {
  /// Writes all of them into a contiguous tensor of the same shape, dtype and device.
  std::function<void(const Tensor&)> fill;
  /// The same in words: where they are equal, so are the values.
  std::string what;
};

/// Whether defer() takes it: contiguous, of at least 1,024 elements, with memory of its own that
/// the allocator gave, and neither a weight with a master nor one that ranks have in parts.
bool can_defer(const Tensor& x);
/// Forgets the values of x and gives its memory back. The first use of x, or of a tensor that
/// shares its memory, fills it again, on the thread that asks (one at a time). What fill throws,
/// the use throws, and the next use fills again. Throws InvalidArgument where can_defer() is false.
void defer(const Tensor& x, DeferredValues values);
/// What the values were said to be, as long as nobody has asked for them; empty otherwise.
const std::string& deferred(const Tensor& x);

}  // namespace cairn::core
