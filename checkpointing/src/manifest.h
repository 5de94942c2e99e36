// manifest.json: what a checkpoint must hold. Its last member is the checksum of all the others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/checkpointing/checkpoint_folder.h"

namespace cairn::checkpointing {

struct ManifestFile {
  std::string name;  // "state.safetensors"
  std::uint64_t bytes = 0;
  std::vector<CheckpointEntry> entries;
};

struct Manifest {
  std::int64_t step = 0;
  int world_size = 1;
  std::vector<ManifestFile> files;
};

std::string manifest_text(const Manifest& manifest);
/// Throws core::DataError naming `path` and what is wrong.
Manifest parse_manifest(const std::string& text, const std::string& path);

// One file's part, as ranks hand it to rank 0.
std::string manifest_file_text(const ManifestFile& file);
ManifestFile parse_manifest_file(const std::string& text, const std::string& path);

}  // namespace cairn::checkpointing
