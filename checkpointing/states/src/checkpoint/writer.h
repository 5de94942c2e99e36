// The files of one save, from the first folder to the removal of what it makes needless.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cairn/checkpointing/training_state.h"
#include "checkpoint/manifest.h"
#include "formats/flat_state.h"
#include "io/saving_mark.h"

namespace cairn::checkpointing {

/// What one rank writes.
struct RankContents {
  bool has_shared = false;  // rank 0
  FlatState shared, own;
};

struct SavePlan {
  std::string dir;
  Manifest manifest;  // its lineage (the number: the least that it may get), world, metric and
                      // libraries; files come with commit
  int rank = 0;
  TrainingStateOptions options;
  std::vector<std::string> damaged;  // paths of checkpoints that do not count as good
  std::shared_ptr<const SavingMark> mark = std::make_shared<SavingMark>();  // until it is whole

  std::string folder() const;     // dir/step-00000500
  std::string temporary() const;  // dir/.step-00000500.tmp
};

/// Throws core::InvalidArgument for rules that keep nothing, or the best by no order.
void check_rules(const RetentionPolicy& rules, const char* where);

/// Removes what nobody needs any more; where that fails, with a warning.
void try_to_remove(const std::string& path);

/// After a killed run: restores a checkpoint whose replacement was never completed and deletes
/// other leftovers. Nothing is removed before the names that make it needless are flushed.
void clear_leftovers(const std::string& dir);

/// Rank 0, before anything is saved: removes what the options do not keep and a killed run left,
/// all verified. Of this line, or where it is empty of the newest, the first ones stay.
void remove_needless(const std::string& dir, const TrainingStateOptions& options,
                     const std::vector<std::uint64_t>& line);

/// Rank 0, who holds the folder's lock: makes the temporary folder, clears what killed saves have
/// left, and gives the save its number.
void prepare(SavePlan& plan);

/// Writes this rank's files. Returns the manifest's part of the shared file (rank 0 only), a line
/// feed, that of the rank's own.
std::string write_rank_files(const SavePlan& plan, const RankContents& contents);

struct Committed {
  std::int64_t save = 0;  // its number
  std::uint64_t id = 0;   // the manifest's checksum
  std::uint64_t bytes = 0;
};
/// Rank 0, with what write_rank_files returned on each rank: gives the checkpoint its name, for
/// good, and removes those that the options do not keep.
Committed commit(SavePlan& plan, const std::vector<std::string>& files);

/// Rank 0, where a save failed: removes what it has written, and what the options do not keep. On a
/// full disk a killed run's one too many would otherwise stand in the way for ever.
void give_up(const SavePlan& plan);

}  // namespace cairn::checkpointing
