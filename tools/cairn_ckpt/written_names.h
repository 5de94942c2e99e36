// What gets a name in a folder while somebody looks on, be it gone again a moment later.
#pragma once

#include <set>
#include <string>

namespace cairn::tools {

class WrittenNames {
 public:
  /// From now on. Throws core::IoError where the system has no more watches.
  explicit WrittenNames(const std::string& folder);
  ~WrittenNames();
  WrittenNames(const WrittenNames&) = delete;
  WrittenNames& operator=(const WrittenNames&) = delete;

  /// Takes what has happened since the last look. Throws core::IoError where that was more than the
  /// system keeps (16384 names as a rule).
  void look();
  const std::set<std::string>& names() const { return names_; }  // made there, or renamed to
  bool folder_removed() const { return removed_; }

 private:
  int events_;
  std::set<std::string> names_;
  bool removed_ = false;
};

}  // namespace cairn::tools
