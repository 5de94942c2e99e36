// Gradients in the layout of their parameters.
#pragma once

#include <vector>

#include "cairn/kernels/beside.h"

namespace cairn::optim {

using kernels::copy_beside;
using kernels::empty_beside;
using kernels::same_layout;

/// `values` itself where it is laid out like x, else a copy, kept alive by `temporaries`. Has x's
/// strides.
inline TensorView laid_out_like(const Tensor& x, const Tensor& values,
                                std::vector<Tensor>& temporaries) {
  if (same_layout(values, x)) {
    return {values.raw_data(), x.shape(), x.strides(), values.dtype(), values.device()};
  }
  temporaries.push_back(copy_beside(x, values, values.dtype(), core::MemoryCategory::workspace));
  return temporaries.back();
}

}  // namespace cairn::optim
