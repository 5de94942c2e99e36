#include "cairn/checkpointing/checkpoint_folder.h"

#include <algorithm>

#include "cairn/core/error.h"
#include "file_io.h"
#include "manifest.h"
#include "step_folder.h"
#include "stored_file.h"

namespace cairn::checkpointing {

namespace {

Manifest read_manifest(const std::string& path) {
  const std::string file = path + "/" + kManifestName;
  return parse_manifest(read_text(file), file);
}

// The contents under their names in read_checkpoint: state.safetensors as they are,
// rank-0.safetensors below "rank-0".
FlatState read_files(const std::string& path, const Manifest& manifest,
                     std::vector<std::string>& damage) {
  FlatState values;
  for (const ManifestFile& file : manifest.files) {
    for (auto& [name, value] : read_stored_file(path, file, damage)) {
      values.emplace_back(entry_prefix(file.name) + name, std::move(value));
    }
  }
  return values;
}

}  // namespace

std::uint64_t CheckpointEntry::bytes() const {
  if (kind == EntryKind::text || kind == EntryKind::dictionary) return 0;
  return static_cast<std::uint64_t>(shape.numel()) * core::size_of(dtype);
}

CheckpointSummary summarize_checkpoint(const std::string& path) {
  const Manifest manifest = read_manifest(path);
  CheckpointSummary summary;
  summary.step = manifest.step;
  summary.world_size = manifest.world_size;
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
    read_files(path, read_manifest(path), damage);
  } catch (const core::DataError& e) {
    damage.push_back(e.what());
  } catch (const core::IoError& e) {
    damage.push_back(e.what());
  }
  return damage;
}

StateDict read_checkpoint(const std::string& path) {
  std::vector<std::string> damage;
  const FlatState values = read_files(path, read_manifest(path), damage);
  if (damage.empty()) return unflatten(values);
  std::string list;
  for (const std::string& line : damage) list += "\n  " + line;
  core::fail<core::DataError>("checkpoint", "expected a whole checkpoint in '", path,
                              "', got:", list);
}

std::vector<std::string> list_checkpoints(const std::string& dir) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  for (const std::string& name : list_folder(dir)) {
    const std::int64_t step = step_of_folder(name);
    if (step >= 0) found.emplace_back(step, dir + "/" + name);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

}  // namespace cairn::checkpointing
