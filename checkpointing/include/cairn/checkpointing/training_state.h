// TrainingState: everything a run needs to go on as if it had never stopped, in one checkpoint.
//
//   checkpointing::TrainingState state(
//       {{"model", model}, {"optimizer", optimizer}, {"amp", precision}, {"sampler", sampler}},
//       group.world());
//   state.resume_latest("runs/mnist");        // nothing there: starts fresh
//   for (const data::Batch& batch : loader) {
//     train_step(batch);
//     state.save_every(500, "runs/mnist");
//   }
//
// A checkpoint is a folder:
//
//   runs/mnist/step-00000500/
//     state.safetensors    the parts, which are the same on every rank ("model.fc.weight" ...);
//                          written by rank 0
//     rank-0.safetensors   what is each rank's own: the generator of the calling thread, and by
//                          which routes products were computed (kernels/product_choices.h)
//     manifest.json        step, world size, which save of the folder this is and which ones it
//                          continues, each file's bytes, and of every entry: kind, dtype, shape,
//                          XXH3 checksum; itself checksummed
//
// Numbers are stored as scalar F64 and I64 tensors (every bit of them), text in the manifest. Stock
// Python reads the .safetensors files.
//
// Saving is atomic: all is written under a temporary name, flushed to the disk and renamed; a
// crash, a full disk, a kill or a loss of power leaves the checkpoints before it, and what save()
// has returned from is safe. Loading verifies every checksum before anything changes.
//
// The newest checkpoint is the one saved last, whatever its step. A run that resumes step 800 while
// 900 and 1000 exist, or that starts anew in an old folder, leaves the others behind: resuming
// never goes back to them by itself.
//
// With several ranks each call is a collective: every rank calls it, with the same arguments, and
// the folder is one that all of them see. An error on one rank becomes an error on all of them; a
// rank that does not come ends in the World's CommunicationError.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"

namespace cairn::checkpointing {

struct Manifest;

struct TrainingStateOptions {
  /// Good checkpoints that stay in a folder: first the newest of this run's line, then, while those
  /// are fewer, the newest of runs that were left behind.
  int keep = 3;
};

struct ResumeInfo {
  std::string path;
  std::int64_t step = 0;
  int world_size = 1;  // of the run that saved it; any other may continue it
};

class TrainingState {
 public:
  /// A name (no '.', not "rank-...") and what is saved under it. Only a reference is kept.
  struct Part {
    Part(std::string part_name, core::Stateful& part)
        : name(std::move(part_name)), stateful(&part) {}
    std::string name;
    core::Stateful* stateful;
  };

  TrainingState(std::initializer_list<Part> parts, World world = {},
                const TrainingStateOptions& options = {});

  /// Steps saved, resumed or counted by save_every; 0 at first.
  std::int64_t step() const { return step_; }

  /// Writes `dir`/step-<step> (replacing one of that step) and removes what `keep` no longer
  /// covers. Returns its path, once it would outlive a loss of power. Throws core::IoError for a
  /// folder that cannot be written or is full: what stood there is untouched, except that of this
  /// step the new one may stand where only the last flush failed.
  std::string save(const std::string& dir, std::int64_t step);
  /// Counts a step; saves each n-th. Returns whether it saved.
  bool save_every(std::int64_t n, const std::string& dir);

  /// Loads the checkpoint saved last; nothing where there is none. A damaged one is passed over, in
  /// favour of the newest that it continues, with a warning that names the damage. Throws
  /// core::DataError where all of that line are damaged, or the good one does not fit the parts.
  std::optional<ResumeInfo> resume_latest(const std::string& dir);
  /// Loads this checkpoint (a step-... folder). Throws core::IoError where it cannot be read and
  /// core::DataError where it is damaged or does not fit, naming every missing, surplus and
  /// mis-shaped entry. Nothing has changed then, on any rank: what had loaded is loaded back.
  ResumeInfo resume(const std::string& path);

 private:
  struct Loaded {
    std::string path;  // empty: there was none
    StateDict contents;
  };
  using Undo = std::vector<std::function<void()>>;
  std::string together(const std::string& what, const std::function<std::string()>& work,
                       std::vector<std::string>* answers = nullptr) const;
  Loaded newest_good(const std::string& dir);
  std::optional<ResumeInfo> load(const std::string& what, const std::function<Loaded()>& choose);
  void apply(const Loaded& loaded, int saved_world_size, Undo& undo);
  std::string write_files(const std::string& folder, const std::string& lineage) const;
  void commit(const std::string& dir, Manifest& manifest, const std::vector<std::string>& files);
  void remove_old(const std::string& dir) const;

  std::vector<Part> parts_;
  World world_;
  TrainingStateOptions options_;
  std::int64_t step_ = 0;
  std::vector<std::uint64_t> line_;   // checksums of the manifests that this run continues
  std::vector<std::string> damaged_;  // seen while resuming: they do not count as good
};

}  // namespace cairn::checkpointing
