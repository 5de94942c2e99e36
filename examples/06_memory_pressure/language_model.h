// A language model whose output is what fills the memory: words x tokens of logits, and as many
// bytes of gradient.
#pragma once

#include <vector>

#include "outcome.h"

namespace memory_pressure {

/// The first one is the plain way, which the others are compared with.
std::vector<Way> language_model_ways();

}  // namespace memory_pressure
