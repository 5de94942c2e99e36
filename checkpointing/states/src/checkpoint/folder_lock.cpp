#include "checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "io/printable.h"
#include "io/system_calls.h"

namespace cairn::checkpointing {

namespace {

constexpr auto kBetweenTries = std::chrono::milliseconds(20);
constexpr int kTries = 100;  // 2 seconds: what a killed process takes to be gone

using Identity = std::pair<dev_t, ino_t>;

std::string this_process() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return core::str("process ", getpid(), " on ", host.data(), "\n");
}

std::string holder_of(int file) {
  std::array<char, 320> text{};
  const ssize_t n = system_calls().read(file, text.data(), text.size() - 1, 0);
  const std::string all(text.data(), n < 0 ? 0 : static_cast<std::size_t>(n));
  const std::string line = all.substr(0, all.find('\n'));
  return line.empty() ? "another process" : printable(line);
}

bool lacks_locks(int reason) {
  return reason == ENOLCK || reason == EOPNOTSUPP || reason == ENOSYS || reason == EINVAL;
}

void wait_for_lock(int file, const std::string& folder) {
  for (int tries = 0; system_calls().lock(file) != 0;) {
    const int reason = errno;
    if (reason == EINTR) continue;
    if (lacks_locks(reason)) {
      log::warn("'{}' is on a file system without locks: see that one job writes there", folder);
      return;
    }
    if (reason != EWOULDBLOCK) {
      core::fail<core::IoError>("folder", "expected to lock '", folder,
                                "', got: ", std::strerror(reason));
    }
    if (++tries == kTries) {
      core::fail<core::IoError>("folder", "expected to be the only one that saves in '", folder,
                                "', got ", holder_of(file),
                                ", which does (end it, or use another folder; a program that only "
                                "loads sets read_only)");
    }
    system_calls().sleep(kBetweenTries);
  }
}

// What is written there must reach nobody else's file: neither a link's nor one with a second name.
int open_lock(const std::string& folder, struct stat& status) {
  const std::string path = core::str(folder, "/", kLockName);
  const int file = system_calls().open(path, O_RDWR | O_CREAT | O_NOFOLLOW);
  const bool known = file >= 0 && system_calls().status(file, status) == 0;
  if (known && S_ISREG(status.st_mode) && status.st_nlink <= 1) return file;
  const std::string reason = known ? "it is no file of its own" : std::strerror(errno);
  if (file >= 0) system_calls().close(file);
  core::fail<core::IoError>("folder", "expected a folder that checkpoints can be written to, got '",
                            folder, "', in which ", kLockName, " cannot be opened: ", reason);
}

}  // namespace

std::shared_ptr<FolderLock> FolderLock::take(const std::string& folder) {
  static std::mutex mutex;
  static std::map<Identity, std::weak_ptr<FolderLock>> held;  // of this process
  const std::lock_guard guard(mutex);
  struct stat status {};
  const int file = open_lock(folder, status);
  std::shared_ptr<FolderLock> lock(new FolderLock(file));  // closes it
  std::weak_ptr<FolderLock>& known = held[{status.st_dev, status.st_ino}];
  if (std::shared_ptr<FolderLock> mine = known.lock()) return mine;
  wait_for_lock(file, folder);
  const std::string text = this_process();
  system_calls().write(file, text.data(), text.size(), 0);  // for others' messages
  known = lock;
  return lock;
}

FolderLock::~FolderLock() {
  system_calls().close(file_);
}

}  // namespace cairn::checkpointing
