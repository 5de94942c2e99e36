// Gradients in the layout of their parameters.
#pragma once

#include "cairn/kernels/beside.h"

namespace cairn::optim {

using kernels::copy_beside;
using kernels::empty_beside;
using kernels::laid_out_like;
using kernels::same_layout;

}  // namespace cairn::optim
