#include "training/background_save.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/packer.h"
#include "checkpoint/step_folder.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(2);

// What a rank has written, or why it could not. No note is ever seen in part.
void leave_note(const std::string& path, bool failed, const std::string& text) {
  const std::string unfinished = path + ".part";
  WritableFile file(unfinished);
  file.write(core::Packer().number(failed ? 1 : 0).text(text).bytes());
  file.close();
  rename(unfinished, path);
}

}  // namespace

BackgroundSave::BackgroundSave(SavePlan plan, std::optional<RankContents> contents,
                               std::string written, std::unique_ptr<SaveTurn> turn)
    : plan_(std::move(plan)),
      contents_(std::move(contents)),
      written_(std::move(written)),
      turn_(std::move(turn)),
      thread_([this] { run(); }) {}

BackgroundSave::~BackgroundSave() {
  if (!thread_.joinable()) return;
  abandoned_ = std::uncaught_exceptions() > 0;
  thread_.join();
  if (!error_) return;
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& e) {
    log::error("the save of step {} in the background failed: {}", plan_.manifest.lineage.step,
               e.what());
  } catch (...) {  // a test's
  }
}

Committed BackgroundSave::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return committed_;
}

void BackgroundSave::run() {
  const auto start = std::chrono::steady_clock::now();
  try {
    finish_rank();
  } catch (...) {
    error_ = std::current_exception();
  }
  contents_.reset();
  turn_.reset();
  plan_.mark.reset();
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  done_ = true;
}

std::string BackgroundSave::note_of(int rank) const {
  return core::str(plan_.temporary(), "/", rank_name(rank), ".note");
}

// What every rank has written, rank 0 first.
std::vector<std::string> BackgroundSave::gather() const {
  const std::string what = core::str("save of step ", plan_.manifest.lineage.step);
  std::vector<std::string> files = {written_};
  const auto deadline = std::chrono::steady_clock::now() + plan_.options.peer_timeout;
  for (int rank = 1; rank < plan_.manifest.world_size; ++rank) {
    while (!exists(note_of(rank))) {
      if (abandoned_ || std::chrono::steady_clock::now() > deadline) {
        core::fail<core::CommunicationError>(
            what, "expected the files of every rank in '", plan_.temporary(),
            "', got none of rank ", rank,
            abandoned_ ? core::str(" when the job ended")
                       : core::str(" in ", plan_.options.peer_timeout.count(), " ms"));
      }
      if (!exists(plan_.temporary())) {
        core::fail<core::IoError>(what,
                                  "expected every rank to succeed, got one that could not "
                                  "even write why not (its log says)");
      }
      std::this_thread::sleep_for(kBetweenLooks);
    }
    const std::string note = read_text(note_of(rank));
    core::Unpacker message(note);
    const bool failed = message.number() != 0;
    const std::string text = message.text();
    if (failed) {
      core::fail<core::IoError>(what, "expected every rank to succeed, got on rank ", rank, ": ",
                                text);
    }
    remove_everything(note_of(rank));
    files.push_back(text);
  }
  return files;
}

// Where not even that can be written, as on a full disk, everything goes, which rank 0 sees too.
void BackgroundSave::tell_failure(const std::string& reason) const {
  try {
    leave_note(note_of(plan_.rank), /*failed=*/true, reason);
  } catch (const core::IoError&) {
    log::error("save of step {}: {}", plan_.manifest.lineage.step, reason);
    try_to_remove(plan_.temporary());
  }
}

void BackgroundSave::finish_rank() {
  const bool first = plan_.rank == 0;
  try {
    if (contents_) written_ = write_rank_files(plan_, *contents_);
    if (!first) return leave_note(note_of(plan_.rank), /*failed=*/false, written_);
    committed_ = commit(plan_, gather());
  } catch (const std::exception& e) {
    if (first) give_up(plan_);
    if (!first) tell_failure(e.what());
    throw;
  }
}

}  // namespace cairn::checkpointing
