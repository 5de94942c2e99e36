// manifest.json: what a checkpoint must hold, and which saves it continues (lineage.h). Its last
// member is the checksum of all the others, by which other manifests name it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cairn/checkpointing/checkpoint_folder.h"

namespace cairn::checkpointing {

struct ManifestFile {
  std::string name;  // "state.safetensors"
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> header;  // XXH3 of all before the data; older writers did not tell
  std::vector<CheckpointEntry> entries;
};

inline constexpr std::size_t kLongestLine = 100;  // saves that a manifest names

struct Lineage {
  std::int64_t step = 0;
  std::int64_t save = 0;                 // of its folder, from 1; 0: from before they were counted
  std::vector<std::uint64_t> continues;  // checksums of manifests, the newest save first
};

struct Manifest {
  Lineage lineage;
  int world_size = 1;
  std::optional<double> metric;     // finite
  LibraryVersions libraries;        // of the run that saved
  std::vector<ManifestFile> files;  // state.safetensors and one a rank, in any order
  std::uint64_t checksum = 0;       // of one that was read
};

struct ManifestText {
  std::string text;
  std::uint64_t checksum = 0;
};
/// Of files that parse_manifest_file has returned. Throws core::DataError naming `path` where a
/// reader would refuse what is written.
ManifestText manifest_text(const Manifest& manifest, const std::string& path);
/// Believes nothing that the text says. Throws core::DataError naming `path` and what is wrong.
Manifest parse_manifest(const std::string& text, const std::string& path);
/// The same, its checksum verified, but without the files, and of what they are told to hold
/// nothing is checked: it takes a tenth of the time where there are a million entries.
Manifest parse_manifest_head(const std::string& text, const std::string& path);
/// Those of a checkpoint's folder. Throw core::IoError where there is none.
Manifest read_manifest(const std::string& folder);
Manifest read_manifest_head(const std::string& folder);

// The lineage alone, as it is repeated in the metadata of state.safetensors.
inline constexpr const char* kLineageKey = "lineage";
std::string lineage_text(const Lineage& lineage);
Lineage parse_lineage(const std::string& text, const std::string& path);

// One file's part, as ranks hand it to rank 0.
std::string manifest_file_text(const ManifestFile& file);
ManifestFile parse_manifest_file(const std::string& text, const std::string& path);

}  // namespace cairn::checkpointing
