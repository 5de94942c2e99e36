// Checkpoints as files: what one holds, whether it is whole, and its contents. TrainingState writes
// them; tools read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/version.h"

namespace cairn::checkpointing {

enum class EntryKind { tensor, number, integer, text, dictionary };  // dictionary: an empty one
const char* name(EntryKind kind);

/// Where a rank's shard of a tensor lies in it (core::Shard).
struct ShardPlace {
  Shape whole;
  std::int64_t begin = 0;
};

struct CheckpointEntry {
  std::string name;  // "model.fc.weight", "rank-0.generator.seed", "rank-0.shards.model.fc.weight"
  std::string file;  // "state.safetensors"
  EntryKind kind = EntryKind::tensor;
  DType dtype = DType::f32;  // of tensor, number (f64) and integer (i64)
  Shape shape;
  std::uint64_t checksum = 0;  // XXH3 of the bytes, row-major
  std::string text;            // of text
  std::optional<ShardPlace> shard;

  bool in_file() const;         // tensors, numbers and integers; text stands in the manifest
  std::uint64_t bytes() const;  // in the file
};

/// {"cairn", "0.1.0"}, {"compiler", "GCC 12.2.0"}, {"oneDNN", "2.6.0"} ...
using core::LibraryVersions;

struct CheckpointSummary {
  std::int64_t step = 0;
  std::int64_t save = 0;                 // 1-based index of this save in its folder; 0: unknown
  std::uint64_t id = 0;                  // the checksum of its manifest
  std::vector<std::uint64_t> continues;  // ids of the saves that it continues, the newest first
  int world_size = 1;
  std::optional<double> metric;  // that the save was given
  LibraryVersions libraries;     // of the run that saved; empty where it did not tell
  std::vector<CheckpointEntry> entries;
};

/// What the manifest says. Throws core::IoError where there is none, core::DataError where it is
/// damaged.
CheckpointSummary summarize_checkpoint(const std::string& path);

/// Everything wrong with it (missing or damaged files, checksums that differ), a line each; empty
/// for a good one. Throws core::IoError where the disk does not answer.
std::vector<std::string> find_damage(const std::string& path);

/// The contents, verified: {"model": {...}, ..., "rank-0": {...}, ...}; what the ranks held as
/// shards is whole. Throws core::DataError naming all damage.
StateDict read_checkpoint(const std::string& path);

/// What can still be read of a damaged one, or of a failing disk, and a line for all that cannot.
/// Where the manifest is damaged nothing is verified, and numbers and integers are tensors.
struct SalvagedCheckpoint {
  StateDict contents;
  std::vector<std::string> damage;
};
SalvagedCheckpoint salvage_checkpoint(const std::string& path);

/// Writes a checkpoint once more, as `to` (".../step-<n>" of the same step, or a folder for it), as
/// a job of `world_size` ranks would have saved it: shards are cut anew, evenly, and joined for a
/// world of one. Ranks that the job did not have get what they would have on resuming. Returns the
/// new one's path. Throws core::DataError for damage, core::IoError where `to` exists or cannot be
/// written.
std::string reshard_checkpoint(const std::string& from, const std::string& to, int world_size);

/// Which metric is the best: the lowest of a loss, the highest of an accuracy.
enum class Best { lowest, highest };

/// What TrainingStateOptions of the same names keep.
struct RetentionPolicy {
  int keep = 3;
  std::int64_t keep_every = 0;
  int keep_best = 0;
  std::optional<Best> best = {};
};
/// Removes the checkpoints of a folder that the rules do not keep; damaged ones do not count. Each
/// is verified. Returns the paths that went, or would. Throws core::IoError where another process
/// saves there.
std::vector<std::string> prune_checkpoints(const std::string& dir, const RetentionPolicy& rules,
                                           bool dry_run = false);

/// The folders `dir`/step-<n>, the last saved first, whatever its step; before those the ones so
/// damaged that their age is unknown. None where there is no such folder. (Where a kill fell into
/// the replacing of a step, its old checkpoint is listed by its hidden name.)
std::vector<std::string> list_checkpoints(const std::string& dir);

/// Of those, the ones that the last saved one continues, it first: what resuming tries in turn. The
/// others belong to runs that were left behind, by going back to an earlier step or starting anew.
std::vector<std::string> newest_line(const std::string& dir);

/// Nested dictionaries as one list of "a.b.c" names, in order. An empty dictionary is an entry of
/// its own.
std::vector<std::pair<std::string, StateDict::Value>> flatten(const StateDict& state);

}  // namespace cairn::checkpointing
