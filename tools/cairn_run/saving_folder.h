// Where ranks that save their training state leave a mark, so that they are not killed meanwhile.
#pragma once

#include <string>

namespace cairn::run {

/// A temporary folder; ranks lock a file in it while they save (checkpointing::SavingMark).
class SavingFolder {
 public:
  SavingFolder();
  ~SavingFolder();
  SavingFolder(const SavingFolder&) = delete;
  SavingFolder& operator=(const SavingFolder&) = delete;
  const std::string& path() const { return path_; }  // empty: it could not be made
  /// A file there is locked: a lock ends with its process.
  bool in_use() const;

 private:
  std::string path_;
};

}  // namespace cairn::run
