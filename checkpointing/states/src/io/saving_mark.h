// Tells cairn-run that this process saves, and must not be killed meanwhile.
#pragma once

#include <string>

namespace cairn::checkpointing {

/// A locked file in the folder that the launcher names in CAIRN_SAVING_FOLDER, while it lives; the
/// system gives the lock up with the process. Nothing where no launcher asks for it, or the folder
/// cannot be written.
class SavingMark {
 public:
  SavingMark();
  ~SavingMark();
  SavingMark(const SavingMark&) = delete;
  SavingMark& operator=(const SavingMark&) = delete;

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace cairn::checkpointing
