// Which options go together.
#pragma once

#include "cairn/parallel/reducer.h"

namespace cairn::parallel {

/// Throws InvalidArgument for a value out of range and for a combination that makes no sense.
void check_options(const ReducerOptions& options);

}  // namespace cairn::parallel
