// The calls by which checkpointing reaches the file system, in one place: a test puts a simulated
// disk in their stead that is full, fails, is killed or loses power at any of them.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cairn::checkpointing {

/// Each does what the POSIX call of its name does: -1 and errno where it fails. Called by several
/// threads at once.
class SystemCalls {
 public:
  virtual ~SystemCalls() = default;

  virtual int open(const std::string& path, int flags);
  virtual ssize_t read(int file, void* data, std::size_t bytes, std::uint64_t offset);
  virtual ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset);
  virtual int fsync(int file);
  /// Has the disk begin with what was written there, so that fsync finds less to do. A hint, which
  /// small pieces do not give; what goes wrong is fsync's to tell.
  virtual void start_flush(int file, std::uint64_t offset, std::size_t bytes);
  virtual int lock(int file);  // exclusive, without waiting: EWOULDBLOCK where another has it
  virtual void sleep(std::chrono::milliseconds time);  // between tries of lock
  /// Shares the file's bytes, read as they are touched, written for this process alone. nullptr and
  /// errno where the file system has no such call.
  virtual void* map(int file, std::size_t bytes);
  /// Reads pages of a map now, so that what cannot be read is an error and not a signal.
  virtual int populate(void* data, std::size_t bytes);
  virtual void unmap(void* data, std::size_t bytes);
  virtual int close(int file);
  virtual int status(int file, struct stat& status);

  virtual int status(const std::string& path, struct stat& status);  // of a link: its own
  virtual int list(const std::string& folder, std::vector<std::string>& names);
  virtual int make_folder(const std::string& path);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int remove_file(const std::string& path);
  virtual int remove_folder(const std::string& path);  // an empty one
};

/// The calls in use: the system's, unless a guard lives.
SystemCalls& system_calls();

/// Puts others in their stead, for every thread, while it lives. For tests.
class SystemCallsGuard {
 public:
  explicit SystemCallsGuard(SystemCalls& calls);
  ~SystemCallsGuard();
  SystemCallsGuard(const SystemCallsGuard&) = delete;
  SystemCallsGuard& operator=(const SystemCallsGuard&) = delete;

 private:
  SystemCalls* before_;
};

}  // namespace cairn::checkpointing
