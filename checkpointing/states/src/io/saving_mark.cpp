#include "io/saving_mark.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>

namespace cairn::checkpointing {

SavingMark::SavingMark() {
  const char* folder = std::getenv("CAIRN_SAVING_FOLDER");
  if (folder == nullptr) return;
  path_ = std::string(folder) + "/save_XXXXXX";
  file_ = mkostemp(path_.data(), O_CLOEXEC);
  if (file_ >= 0) flock(file_, LOCK_EX | LOCK_NB);
}

SavingMark::~SavingMark() {
  if (file_ < 0) return;
  unlink(path_.c_str());
  close(file_);
}

}  // namespace cairn::checkpointing
