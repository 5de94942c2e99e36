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
// has returned from is safe. save_async() copies the state and returns; a thread writes it. Loading
// verifies every checksum before anything changes.
//
// The newest checkpoint is the one saved last, whatever its step. A run that resumes step 800 while
// 900 and 1000 exist, or that starts anew in an old folder, leaves the others behind: resuming
// never goes back to them by itself.
//
// A folder has one writer: a lock, which ends with its process however that ends, keeps a second
// job out from its first resume_latest() or save on.
//
// With several ranks each call is a collective: every rank calls it, with the same arguments, and
// the folder is one that all of them see. An error on one rank becomes an error on all of them; a
// rank that does not come ends in the World's CommunicationError.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"

namespace cairn::checkpointing {

struct Committed;
struct RankContents;

struct TrainingStateOptions {
  /// Good checkpoints that stay in a folder: first the newest of this run's line, then, while those
  /// are fewer, the newest of runs that were left behind.
  int keep = 3;
  /// Beside them, every one of a step that this divides (0: none), and so many with the best metric
  /// that a save was given; of any line. With keep_best, `best` must say which metric is that: the
  /// lowest (a loss) or the highest (an accuracy).
  std::int64_t keep_every = 0;
  int keep_best = 0;
  std::optional<Best> best = {};
  /// save_every writes in the background, as save_async does.
  bool asynchronous = false;
  /// Host memory that a save in the background may take, on each rank. What does not fit is written
  /// before the call returns, and only flushed in the background.
  std::size_t snapshot_bytes = SIZE_MAX;
  /// How long rank 0's background waits for the other ranks' files.
  std::chrono::milliseconds peer_timeout{120000};
  /// For a program that never saves (an evaluation): resume_latest() then asks neither for a folder
  /// that can be written nor for one in which nobody else saves.
  bool read_only = false;
};

/// What a save cost.
struct SaveReport {
  std::string path;
  std::int64_t step = 0;
  std::uint64_t bytes = 0;           // of all its files but the manifest
  std::uint64_t snapshot_bytes = 0;  // host memory of this rank's copy; 0 where it made none
  double blocked_seconds = 0;        // that the call took, waiting for an earlier save included
  double seconds = 0;                // until the checkpoint was safe, on rank 0
};

struct ResumeOptions {
  /// false: what the state lacks stays as it is, what the training lacks is left out (ResumeInfo
  /// says which); a part of another kind (an Adam's state for an SGD) is both. What differs in
  /// shape is an error still.
  bool strict = true;
  /// {"model.encoder", "model.backbone"}: the file's entry of that name, or all below it, loads
  /// under the other name. The first pair that fits counts.
  std::vector<std::pair<std::string, std::string>> rename;
};

struct ResumeInfo {
  std::string path;
  std::int64_t step = 0;
  int world_size = 1;                      // of the run that saved it; any other may continue it
  std::vector<std::string> kept, ignored;  // where not strict: left as they were; not loaded
};

/// The exit status of a program that a signal of save_on_signal() has ended, its state saved.
inline constexpr int kSavedOnSignal = 75;  // sysexits.h: EX_TEMPFAIL, "try again later"

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
                const TrainingStateOptions& options = {})
      : TrainingState(std::vector<Part>(parts), std::move(world), options) {}
  explicit TrainingState(std::vector<Part> parts, World world = {},
                         const TrainingStateOptions& options = {});
  /// Waits for a save in the background; one that failed is logged.
  ~TrainingState();
  TrainingState(TrainingState&&) noexcept;
  TrainingState& operator=(TrainingState&&) = delete;

  /// Steps saved, resumed or counted by save_every; 0 at first.
  std::int64_t step() const { return step_; }

  /// Writes `dir`/step-<step> (replacing one of that step) and removes what the options do not
  /// keep. Returns its path, once it would outlive a loss of power. Throws core::IoError for a
  /// folder that cannot be written or is full: what stood there is untouched, except that of this
  /// step the new one may stand where only the last flush failed. metric: for keep_best; one that
  /// is not finite counts as none.
  std::string save(const std::string& dir, std::int64_t step, std::optional<double> metric = {});
  /// The same, but returns once the state is copied to host memory; a thread writes the same bytes.
  /// One at a time: waits for the save before. What goes wrong is thrown by the next call.
  void save_async(const std::string& dir, std::int64_t step, std::optional<double> metric = {});
  /// Waits for a save in the background and throws what went wrong with it.
  void finish();
  /// The last save that was found done, by its own call or by the next one.
  const std::optional<SaveReport>& last_save() const { return last_save_; }

  /// Counts a step; saves each n-th. Returns whether it saved. An empty `dir` counts only. The
  /// first call finds out whether the folder can be written.
  bool save_every(std::int64_t n, const std::string& dir);

  /// From now on, once the signal (SIGTERM, say) has come to any rank, the next save_every or
  /// end_on_signal saves to `dir` on all ranks and ends the process by std::exit(kSavedOnSignal).
  /// The handler only sets a mark. With several ranks each such call then is a small collective.
  /// A SIGTERM that comes during that last save does not end it.
  void save_on_signal(int signal, const std::string& dir);
  /// For loops that call save() themselves: after each step, with its number.
  void end_on_signal(std::int64_t step);

  /// Loads the checkpoint saved last; nothing where there is none, or `dir` is empty. A damaged
  /// one, on any rank, is passed over by all, in favour of the newest that it continues, with a
  /// warning that names the damage. Throws core::DataError where all of that line are damaged, or
  /// the good one does not fit the parts; core::IoError, so before the first step, where the folder
  /// cannot be written or another process saves there.
  std::optional<ResumeInfo> resume_latest(const std::string& dir, const ResumeOptions& how = {});
  /// Loads this checkpoint (a step-... folder). Throws core::IoError where it cannot be read and
  /// core::DataError where it is damaged or does not fit, naming every missing, surplus and
  /// mis-shaped entry. Nothing has changed then, on any rank: what had loaded is loaded back. Only
  /// gradients that waited for a step may be gone, as after any load: clear the rest (clear_grad).
  ResumeInfo resume(const std::string& path, const ResumeOptions& how = {});

 private:
  struct Loaded;
  struct Impl;
  using Undo = std::vector<std::function<void()>>;
  void open(const std::string& dir);
  void check_save(const std::string& dir, std::int64_t step) const;
  void start_save(const std::string& dir, std::int64_t step, std::optional<double> metric,
                  bool asynchronous);
  RankContents contents_of_rank() const;
  void saved(const SaveReport& report, const Committed& committed,
             const std::vector<std::string>& damaged);
  bool signal_came() const;
  Loaded read(const std::string& path) const;
  std::string try_to_read(const std::string& path, Loaded& loaded) const;
  Loaded newest_good(const std::string& dir);
  ResumeInfo load(Loaded loaded, const ResumeOptions& how);
  static void load_part(const Part& part, const StateDict& loaded, const StateDict& before,
                        const ResumeOptions& how, ResumeInfo& info);
  static StateDict in_form_of(const StateDict& wanted, const Loaded& loaded,
                              const ResumeOptions& how);
  void apply(const Loaded& loaded, const ResumeOptions& how, Undo& undo, ResumeInfo& info);

  std::vector<Part> parts_;
  World world_;
  TrainingStateOptions options_;
  std::int64_t step_ = 0;
  std::vector<std::uint64_t> line_;   // checksums of the manifests that this run continues
  std::int64_t last_number_ = 0;      // of these saves, among those of their folder
  std::vector<std::string> damaged_;  // seen while resuming: they do not count as good
  std::optional<SaveReport> last_save_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::checkpointing
