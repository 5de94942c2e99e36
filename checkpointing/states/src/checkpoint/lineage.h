// Which save continues which. Steps do not say: a run that goes back to step 800 while 900 and 1000
// exist leaves those behind, and its 810 is the newer.
//
// Each manifest has the 1-based index of its save in the folder and the saves it continues. So the
// newest save is known by its number, and its line, back along which a run recovers from damage,
// by the checksums of the manifests on it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"

namespace cairn::checkpointing {

/// A checkpoint of a folder.
struct CheckpointInfo {
  std::string path;
  std::int64_t step = 0;
  std::uint64_t id = 0;  // the manifest's checksum; 0 where it cannot be read
  bool known = false;    // whether its lineage is: by the manifest, else by the file of the parts
  Lineage lineage;
  std::optional<double> metric;
};

/// All checkpoints of `dir`, the newest save first; before those the ones of unknown lineage, which
/// are damaged and may be of any age. Throws IoError where one cannot be read for another reason.
std::vector<CheckpointInfo> checkpoints_in(const std::string& dir);

/// Of those, the ones of unknown lineage, then the newest save and those that it continues: what
/// resuming tries in turn. The others belong to lines that were left behind.
std::vector<CheckpointInfo> newest_line(const std::vector<CheckpointInfo>& checkpoints);

/// The number of the next save.
std::int64_t next_save(const std::vector<CheckpointInfo>& checkpoints);

/// What a run that loads this checkpoint continues: itself and what it continues, kLongestLine at
/// most.
std::vector<std::uint64_t> line_of(const std::string& path, const Manifest& manifest);

}  // namespace cairn::checkpointing
