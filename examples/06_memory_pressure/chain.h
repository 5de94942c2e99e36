// A chain of residual blocks over one large image: one sample's activations are over the budget.
#pragma once

#include <vector>

#include "outcome.h"

namespace memory_pressure {

/// The first one is the plain way, which the others are compared with.
std::vector<Way> chain_ways();

}  // namespace memory_pressure
