// One .safetensors file of a checkpoint: written with its part of the manifest, read back against
// it.
#pragma once

#include <string>
#include <vector>

#include "cairn/checkpointing/safetensors.h"
#include "checkpoint/manifest.h"
#include "formats/flat_state.h"

namespace cairn::checkpointing {

/// Writes the entries to `folder`/`name`, flushed to the disk; returns what the manifest says of
/// it.
ManifestFile write_stored_file(const std::string& folder, const std::string& name,
                               const FlatState& entries, SafetensorsMetadata metadata = {});

/// How tensors come into memory: by copy, or as the file's own pages (SafetensorsReader::map).
/// salvage: by copy, and what the disk does not give is damage too.
enum class ReadBy { copy, map, salvage };

/// Reads and verifies `folder`/`file.name`. Each thing wrong adds a line to `damage`; the values
/// are complete only where none was added. Otherwise throws IoError where the disk does
/// not answer.
FlatState read_stored_file(const std::string& folder, const ManifestFile& file, ReadBy by,
                           std::vector<std::string>& damage);

}  // namespace cairn::checkpointing
