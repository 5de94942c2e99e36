// Where gradients lie (cairn::gradients), under the names that a trainer includes with its
// optimizer.
#pragma once

#include "cairn/gradients/arena.h"

namespace cairn::optim {

using gradients::GradientArena;
using gradients::SharedParameters;
using gradients::wrap_parameter;

}  // namespace cairn::optim
