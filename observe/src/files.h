// Files of a run. What cannot be written is counted, and said once; a training goes on without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace cairn::observe {

/// What could not be written.
class Failures {
 public:
  /// Warns where it is the first.
  void add(const std::string& path, const std::string& why, std::uint64_t records);
  /// Warns again, of all, if there are any.
  void say_at_end(const std::string& folder) const;
  std::uint64_t records() const;
  /// "metrics.csv: 12 lines (No space left on device)", one a file; empty: none.
  std::string describe() const;

 private:
  struct Failure {
    std::string why;  // the last
    std::uint64_t records = 0;
  };
  std::map<std::string, Failure> of_;  // by the file's name
};

/// A file that grows by whole records.
class LogFile {
 public:
  explicit LogFile(Failures& failures) : failures_(failures) {}
  ~LogFile() { close(); }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  /// What stands behind the first `keep` bytes goes. Throws core::IoError.
  void open(const std::string& path, std::size_t keep);
  void add(std::string_view record);
  /// Writes what was added; if that fails, nothing of it stays, neither in the file nor here.
  void flush();
  std::size_t bytes() const { return written_ + waiting_.size(); }
  const std::string& path() const { return path_; }

 private:
  void close();
  Failures& failures_;
  std::string path_, waiting_;
  std::size_t written_ = 0;
  std::uint64_t records_ = 0;  // in waiting_
  int descriptor_ = -1;
};

/// Writes the file whole under another name, and renames it: a reader sees the old one or the new.
/// false: it could not, and the old one stands.
bool replace_file(const std::string& path, std::string_view text, Failures& failures);

}  // namespace cairn::observe
