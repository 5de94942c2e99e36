// A copy of a state in host memory, for a save in the background.
#pragma once

#include <cstdint>

#include "formats/flat_state.h"

namespace cairn::checkpointing {

/// Bytes of its tensors.
std::uint64_t bytes_of(const FlatState& state);

/// The same state in memory of its own: page-locked for what lies on a GPU. Waits for the devices.
FlatState snapshot_of(const FlatState& state);

}  // namespace cairn::checkpointing
