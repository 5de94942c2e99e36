#pragma once

#include "cairn/core/state_dict.h"

namespace cairn::checkpointing {

/// The same state in memory of its own, on the host.
StateDict deep_copy(const StateDict& state);

}  // namespace cairn::checkpointing
