// Gradients in the layout of their parameters.
#pragma once

#include <optional>

#include "cairn/core/sharding.h"
#include "cairn/kernels/empty_with_layout_of.h"

namespace cairn::optim {

using kernels::copy_beside;
using kernels::empty_with_layout_of;
using kernels::laid_out_like;
using kernels::same_layout;

using OwnedRange = std::optional<core::ElementRange>;  // of a parameter; nothing: all of it

/// Of a view laid out like the parameter.
inline TensorView in_part(const TensorView& x, const OwnedRange& part) {
  return part ? core::part_of(x, *part) : x;
}

/// State of a parameter: laid out like it, or [n] of its part. Uninitialised.
inline Tensor empty_state(const Tensor& parameter, const OwnedRange& part, DType dtype) {
  if (!part) return empty_with_layout_of(parameter, dtype);
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  return Tensor::empty({part->size()}, dtype, parameter.device());
}

/// The same with these values (of the parameter's shape, or of its part), converted.
inline Tensor copy_state(const Tensor& parameter, const OwnedRange& part, const Tensor& values,
                         DType dtype) {
  const Tensor state = empty_state(parameter, part, dtype);
  const bool is_whole = values.shape() == parameter.shape();
  if (!part || !is_whole) {
    kernels::copy(values, state);
  } else {
    const Tensor whole =
        copy_beside(parameter, values, values.dtype(), core::MemoryCategory::workspace);
    kernels::copy(core::part_of(whole, *part), state);
  }
  return state;
}

}  // namespace cairn::optim
