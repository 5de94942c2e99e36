#include "saving_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

namespace cairn::run {

namespace fs = std::filesystem;

SavingFolder::SavingFolder() {
  std::error_code error;
  std::string path = (fs::temp_directory_path(error) / "cairn_run_XXXXXX").string();
  if (!error && mkdtemp(path.data()) != nullptr) path_ = path;
}

SavingFolder::~SavingFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

bool SavingFolder::in_use() const {
  if (path_.empty()) return false;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path_, ignored)) {
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) continue;
    const bool locked = flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(file);
    if (locked) return true;
  }
  return false;
}

}  // namespace cairn::run
