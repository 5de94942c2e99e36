#include "cairn/checkpointing/checkpoint_folder.h"

#include <algorithm>

#include "cairn/core/error.h"
#include "checkpoint_reader.h"
#include "file_io.h"
#include "lineage.h"
#include "manifest.h"
#include "step_folder.h"
#include "stored_file.h"

namespace cairn::checkpointing {

namespace {

// The contents under their names in read_checkpoint: state.safetensors as they are,
// rank-0.safetensors below "rank-0".
FlatState values_of(const std::string& path, const Manifest& manifest, ReadBy by,
                    const std::function<bool(const std::string&)>& wanted,
                    std::vector<std::string>& damage) {
  FlatState values;
  for (const ManifestFile& file : manifest.files) {
    if (!wanted(file.name)) continue;
    for (auto& [name, value] : read_stored_file(path, file, by, damage)) {
      values.emplace_back(entry_prefix(file.name) + name, std::move(value));
    }
  }
  return values;
}

bool all_files(const std::string& /*file*/) {
  return true;
}

std::vector<std::string> paths_of(const std::vector<Standing>& standing) {
  std::vector<std::string> paths;
  paths.reserve(standing.size());
  for (const Standing& one : standing) paths.push_back(one.path);
  return paths;
}

}  // namespace

bool CheckpointEntry::in_file() const {
  return kind != EntryKind::text && kind != EntryKind::dictionary;
}

std::uint64_t CheckpointEntry::bytes() const {
  if (!in_file()) return 0;
  return static_cast<std::uint64_t>(shape.numel()) * core::size_of(dtype);
}

CheckpointSummary summarize_checkpoint(const std::string& path) {
  const Manifest manifest = read_manifest(path);
  CheckpointSummary summary;
  summary.step = manifest.lineage.step;
  summary.save = manifest.lineage.save;
  summary.world_size = manifest.world_size;
  summary.metric = manifest.metric;
  summary.libraries = manifest.libraries;
  for (const ManifestFile& file : manifest.files) {
    for (CheckpointEntry entry : file.entries) {
      entry.name = entry_prefix(file.name) + entry.name;
      summary.entries.push_back(std::move(entry));
    }
  }
  return summary;
}

std::vector<std::string> find_damage(const std::string& path) {
  std::vector<std::string> damage;
  try {
    values_of(path, read_manifest(path), ReadBy::map, all_files, damage);
  } catch (const core::DataError& e) {
    damage.push_back(e.what());
  } catch (const core::IoError& e) {
    damage.push_back(e.what());
  }
  return damage;
}

StateDict read_files(const std::string& path, const Manifest& manifest, ReadBy by,
                     const std::function<bool(const std::string&)>& wanted) {
  std::vector<std::string> damage;
  const FlatState values = values_of(path, manifest, by, wanted, damage);
  if (damage.empty()) return unflatten(values);
  std::string list;
  for (const std::string& line : damage) list += "\n  " + line;
  core::fail<core::DataError>("checkpoint", "expected a whole checkpoint in '", path,
                              "', got:", list);
}

StateDict read_checkpoint(const std::string& path) {
  return read_files(path, read_manifest(path), ReadBy::copy, all_files);
}

bool falls_to(const std::string& file, int rank, int world_size) {
  if (file == kStateFile) return true;
  return std::stoi(file.substr(std::string(kRankPrefix).size())) % world_size == rank;
}

namespace {

// Everything in the checkpoint's files, whatever it is: there is no manifest that would tell.
FlatState read_unlisted(const std::string& path, std::vector<std::string>& damage) {
  FlatState values;
  std::vector<std::string> files = list_folder(path);
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    if (!file.ends_with(".safetensors")) continue;
    try {
      const SafetensorsReader reader(core::str(path, "/", file));
      for (const SafetensorsEntry& entry : reader.entries()) {
        values.emplace_back(core::str(entry_prefix(file), entry.name), reader.read(entry));
      }
    } catch (const core::DataError& e) {
      damage.push_back(e.what());
    }
  }
  return values;
}

}  // namespace

SalvagedCheckpoint salvage_checkpoint(const std::string& path) {
  SalvagedCheckpoint salvaged;
  try {
    const Manifest manifest = read_manifest(path);
    salvaged.contents =
        unflatten(values_of(path, manifest, ReadBy::copy, all_files, salvaged.damage));
  } catch (const core::DataError& e) {
    salvaged.damage.push_back(e.what());
    salvaged.contents = unflatten(read_unlisted(path, salvaged.damage));
  }
  return salvaged;
}

std::vector<std::string> list_checkpoints(const std::string& dir) {
  return paths_of(standing_in(dir));
}

std::vector<std::string> newest_line(const std::string& dir) {
  return paths_of(newest_line(standing_in(dir)));
}

}  // namespace cairn::checkpointing
