// Files through POSIX calls, because a checkpoint needs what streams cannot do: flush to the disk
// and say why something failed. Everything throws core::IoError naming the path and the system's
// reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

/// There is no such file, or what has its name is none: damage where a checkpoint names it. Any
/// other IoError (a disk that does not answer) says nothing of what lies there.
class NoSuchFile : public core::IoError {
 public:
  using IoError::IoError;
};

/// The disk, or what this user may have of it, is full: room can be made.
class DiskFull : public core::IoError {
 public:
  using IoError::IoError;
};

class WritableFile {
 public:
  /// Created, or emptied; created, where nothing has that name; one that is there, as it is.
  enum class Mode { replace, create, existing };
  explicit WritableFile(const std::string& path, Mode mode = Mode::replace);
  ~WritableFile();
  WritableFile(const WritableFile&) = delete;
  WritableFile& operator=(const WritableFile&) = delete;

  void write(std::string_view text);  // after what was written last
  /// At a place of its own; several threads may.
  void write_at(std::uint64_t offset, const void* data, std::size_t bytes);
  /// Has the disk begin with that part; several threads may.
  void start_flush(std::uint64_t offset, std::size_t bytes);
  void close();  // flushes to the disk first

 private:
  std::string path_;
  int descriptor_;
  std::uint64_t end_ = 0;
};

class ReadableFile {
 public:
  explicit ReadableFile(const std::string& path);
  ~ReadableFile();
  ReadableFile(const ReadableFile&) = delete;
  ReadableFile& operator=(const ReadableFile&) = delete;

  std::uint64_t size() const { return size_; }
  /// All of [offset, offset + bytes); fewer throw. Several threads may.
  void read(std::uint64_t offset, void* data, std::size_t bytes) const;
  /// [offset, offset + bytes) in pages shared with the file, read now, written for this process
  /// alone; gone with this object. nullptr where they cannot be had: read() then says why, or
  /// works.
  char* map(std::uint64_t offset, std::size_t bytes) const;

 private:
  std::string path_;
  int descriptor_;
  std::uint64_t size_ = 0;
  mutable std::once_flag mapping_;
  mutable char* mapped_ = nullptr;
};

std::string read_text(const std::string& path);
bool exists(const std::string& path);
std::uint64_t file_bytes(const std::string& path);
/// The names in a folder, in any order; none where there is no such folder.
std::vector<std::string> list_folder(const std::string& path);
void make_folders(const std::string& path);  // with its parents, where they are missing
void rename(const std::string& from, const std::string& to);
void remove_everything(const std::string& path);  // a file, or a folder and all below it, if there
/// Throws unless a file can be made, written and flushed there; DiskFull for lack of room. What has
/// the probe's name is removed; a link is not followed.
void check_writable(const std::string& folder, const std::string& probe);
/// Makes its entries (names created, renamed and removed) outlive a loss of power.
void flush_folder(const std::string& path);
/// The same for the folder's own name and those of its parents. One that may not be opened is left
/// out: it was there before any run of this user.
void flush_parents(const std::string& path);

}  // namespace cairn::checkpointing
