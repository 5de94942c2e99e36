#include "cairn/checkpointing/checkpoint_folder.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "cairn/core/error.h"
#include "checkpoint/lineage.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/shards.h"
#include "checkpoint/step_folder.h"
#include "checkpoint/stored_file.h"
#include "io/file_io.h"

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
    FlatState stored = read_stored_file(path, file, by, damage);
    if (values.empty() && entry_prefix(file.name).empty()) {
      values = std::move(stored);
      continue;
    }
    for (auto& [name, value] : stored)
      values.emplace_back(entry_prefix(file.name) + name, std::move(value));
  }
  return values;
}

bool all_files(const std::string& /*file*/) {
  return true;
}

std::vector<std::string> paths_of(const std::vector<CheckpointInfo>& checkpoints) {
  std::vector<std::string> paths;
  paths.reserve(checkpoints.size());
  for (const CheckpointInfo& one : checkpoints) paths.push_back(one.path);
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
  summary.id = manifest.checksum;
  summary.continues = manifest.lineage.continues;
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
  } catch (const NoSuchFile& e) {
    damage.push_back(e.what());
  }
  return damage;
}

namespace {

// Pieces that have been read, by their names in the whole checkpoint.
class PiecesRead {
 public:
  explicit PiecesRead(const FlatState& values) {
    for (const auto& [name, value] : values) {
      if (const Tensor* tensor = tensor_in(value)) tensors_.emplace(name, *tensor);
    }
  }
  const Tensor* find(const CheckpointEntry& piece) const {
    const auto found = tensors_.find(entry_prefix(piece.file) + piece.name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  PieceReader reader() const {
    return [this](const CheckpointEntry& piece) { return *find(piece); };
  }

 private:
  std::map<std::string, Tensor> tensors_;
};

// The values, with every sharded tensor whole in the place of its pieces. One of which a piece is
// lost is lost.
FlatState with_whole_tensors(const FlatState& values, const Manifest& manifest) {
  const PiecesRead pieces(values);
  FlatState whole;
  for (const auto& [name, value] : values) {
    const std::size_t rank_end = name.starts_with(kRankPrefix) ? name.find('.') + 1 : 0;
    const bool piece =
        rank_end > 0 && name.compare(rank_end, std::strlen(kShardPrefix), kShardPrefix) == 0;
    if (!piece) whole.emplace_back(name, value);
  }
  for (const ShardedTensor& tensor : sharded_tensors(manifest)) {
    const bool there =
        std::all_of(tensor.pieces.begin(), tensor.pieces.end(),
                    [&](const ShardPiece& piece) { return pieces.find(*piece.entry) != nullptr; });
    if (there) whole.emplace_back(tensor.name, read_whole(tensor, pieces.reader()));
  }
  return whole;
}

[[noreturn]] void fail_damaged(const std::string& path, const std::vector<std::string>& damage) {
  std::string list;
  for (const std::string& line : damage) list += "\n  " + line;
  core::fail<core::DataError>("checkpoint", "expected a whole checkpoint in '", path,
                              "', got:", list);
}

}  // namespace

StateDict read_files(const std::string& path, const Manifest& manifest, ReadBy by,
                     const std::function<bool(const std::string&)>& wanted) {
  std::vector<std::string> damage;
  FlatState values = values_of(path, manifest, by, wanted, damage);
  if (!damage.empty()) fail_damaged(path, damage);
  return unflatten(std::move(values));
}

StateDict read_checkpoint(const std::string& path) {
  const Manifest manifest = read_manifest(path);
  std::vector<std::string> damage;
  const FlatState values = values_of(path, manifest, ReadBy::copy, all_files, damage);
  if (!damage.empty()) fail_damaged(path, damage);
  return unflatten(with_whole_tensors(values, manifest));
}

bool falls_to(const std::string& file, int rank, int world_size) {
  if (file == kStateFile) return true;
  return std::stoi(file.substr(std::string(kRankPrefix).size())) % world_size == rank;
}

std::uint64_t seed_of_new_rank(std::uint64_t seed, int rank) {
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // spreads neighbouring ranks' seeds
  return seed + kGolden * static_cast<std::uint64_t>(rank);
}

namespace {

void read_all(const SafetensorsReader& reader, const std::string& prefix, FlatState& values,
              std::vector<std::string>& damage) {
  for (const SafetensorsEntry& entry : reader.entries()) {
    try {
      values.emplace_back(prefix + entry.name, reader.read(entry));
    } catch (const core::IoError& e) {
      damage.push_back(core::str("'", entry.name, "' is lost: ", e.what()));
    }
  }
}

// Everything in the checkpoint's files, whatever it is: there is no manifest that would tell.
FlatState read_unlisted(const std::string& path, std::vector<std::string>& damage) {
  FlatState values;
  std::vector<std::string> files = list_folder(path);
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    if (!file.ends_with(".safetensors")) continue;
    try {
      const SafetensorsReader reader(core::str(path, "/", file));
      read_all(reader, entry_prefix(file), values, damage);
    } catch (const core::DataError& e) {
      damage.push_back(e.what());
    } catch (const core::IoError& e) {
      damage.push_back(e.what());
    }
  }
  return values;
}

}  // namespace

SalvagedCheckpoint salvage_checkpoint(const std::string& path) {
  SalvagedCheckpoint salvaged;
  const auto without_manifest = [&](const core::Error& error) {
    salvaged.damage.push_back(error.what());
    salvaged.contents = unflatten(read_unlisted(path, salvaged.damage));
  };
  try {
    const Manifest manifest = read_manifest(path);
    const FlatState values = values_of(path, manifest, ReadBy::salvage, all_files, salvaged.damage);
    salvaged.contents = unflatten(with_whole_tensors(values, manifest));
  } catch (const core::DataError& e) {
    without_manifest(e);
  } catch (const core::IoError& e) {
    without_manifest(e);
  }
  return salvaged;
}

std::vector<std::string> list_checkpoints(const std::string& dir) {
  return paths_of(checkpoints_in(dir));
}

std::vector<std::string> newest_line(const std::string& dir) {
  return paths_of(newest_line(checkpoints_in(dir)));
}

}  // namespace cairn::checkpointing
