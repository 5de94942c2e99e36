// Hugging Face's layout of a model in safetensors files.
#pragma once

#include <string>

#include "formats/flat_state.h"

namespace cairn::checkpointing {

inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kModelIndex = "model.safetensors.index.json";

enum class ReadTensors { now, when_used };  // in their files' pages; deferred (core/deferred.h)

/// A file, an index beside its files, or the folder of either. Names whose tensor is stored under
/// another (tied weights) share it.
FlatState read_safetensors_model(const std::string& path, ReadTensors when = ReadTensors::now);

}  // namespace cairn::checkpointing
