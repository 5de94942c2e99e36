// One writer a folder: a lock that the system gives up with the process that holds it, however that
// ends.
#pragma once

#include <memory>
#include <semaphore>
#include <string>

namespace cairn::checkpointing {

inline constexpr const char* kLockName = ".lock";

class FolderLock {
 public:
  /// Makes this process the folder's writer, for as long as the lock lives; all training states of
  /// a process share one lock. Waits a little for one that is ending; then throws core::IoError
  /// that names the process which has it. On file systems without locks there is none.
  static std::shared_ptr<FolderLock> take(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// One save at a time within this process; begun and ended by any two threads.
  void begin_save() { free_.acquire(); }
  void end_save() { free_.release(); }

 private:
  explicit FolderLock(int file) : file_(file) {}
  int file_;
  std::binary_semaphore free_{1};
};

/// A save's turn, from begin to end.
class SaveTurn {
 public:
  explicit SaveTurn(std::shared_ptr<FolderLock> lock) : lock_(std::move(lock)) {
    lock_->begin_save();
  }
  ~SaveTurn() { lock_->end_save(); }
  SaveTurn(const SaveTurn&) = delete;
  SaveTurn& operator=(const SaveTurn&) = delete;

 private:
  std::shared_ptr<FolderLock> lock_;
};

}  // namespace cairn::checkpointing
