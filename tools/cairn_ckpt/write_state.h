#pragma once

#include <string>

#include "cairn/core/state_dict.h"

namespace cairn::tools {

/// Writes a file or folder of the kind that the name says: .pt (.pth, .bin) for PyTorch,
/// .safetensors, step-<n> (eight digits) for a checkpoint, any other folder for a model in Hugging
/// Face's layout. Throws core::IoError where it exists.
void write_state(const StateDict& state, const std::string& out);

}  // namespace cairn::tools
