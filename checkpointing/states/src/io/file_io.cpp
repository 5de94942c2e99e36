#include "io/file_io.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cairn/core/error.h"
#include "io/printable.h"
#include "io/system_calls.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kLargestCall = std::size_t{1}
                                     << 30;  // the kernel moves no more than 2 GiB at once

[[noreturn]] void fail_io(const char* what, const std::string& path) {
  const int reason = errno;
  const std::string message =
      core::str("expected to ", what, " '", escaped(path), "', got: ", std::strerror(reason));
  const bool none = reason == ENOENT || reason == ENOTDIR || reason == EISDIR;
  if (none) core::fail<NoSuchFile>("file", message);
  if (reason == ENOSPC || reason == EDQUOT) core::fail<DiskFull>("file", message);
  core::fail<core::IoError>("file", message);
}

int open_or_fail(const std::string& path, int flags, const char* what) {
  int descriptor = -1;
  do {
    descriptor = system_calls().open(path, flags);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) fail_io(what, path);
  return descriptor;
}

}  // namespace

namespace {

int flags_of(WritableFile::Mode mode) {
  if (mode == WritableFile::Mode::existing) return O_WRONLY;
  return O_WRONLY | O_CREAT | (mode == WritableFile::Mode::create ? O_EXCL : O_TRUNC);
}

}  // namespace

WritableFile::WritableFile(const std::string& path, Mode mode)
    : path_(path), descriptor_(open_or_fail(path, flags_of(mode), "write")) {}

WritableFile::~WritableFile() {
  if (descriptor_ >= 0) system_calls().close(descriptor_);
}

void WritableFile::write(std::string_view text) {
  write_at(end_, text.data(), text.size());
  end_ += text.size();
}

void WritableFile::write_at(std::uint64_t offset, const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = system_calls().write(descriptor_, at, std::min(bytes, kLargestCall), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("write", path_);
    at += n;
    offset += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
  }
}

void WritableFile::start_flush(std::uint64_t offset, std::size_t bytes) {
  system_calls().start_flush(descriptor_, offset, bytes);
}

void WritableFile::close() {
  if (system_calls().fsync(descriptor_) != 0) fail_io("flush", path_);
  const int descriptor = std::exchange(descriptor_, -1);
  if (system_calls().close(descriptor) != 0) fail_io("close", path_);
}

ReadableFile::ReadableFile(const std::string& path)
    : path_(path), descriptor_(open_or_fail(path, O_RDONLY, "read")) {
  struct stat status {};
  const bool known = system_calls().status(descriptor_, status) == 0;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    return;
  }
  const int reason = known ? EISDIR : errno;
  system_calls().close(descriptor_);
  errno = reason;
  fail_io("read", path_);
}

ReadableFile::~ReadableFile() {
  if (mapped_ != nullptr) system_calls().unmap(mapped_, size_);
  system_calls().close(descriptor_);
}

char* ReadableFile::map(std::uint64_t offset, std::size_t bytes) const {
  std::call_once(mapping_, [&] {
    if (size_ > 0) mapped_ = static_cast<char*>(system_calls().map(descriptor_, size_));
  });
  if (mapped_ == nullptr || bytes == 0 || offset > size_ || bytes > size_ - offset) return nullptr;
  char* data = mapped_ + offset;
  return system_calls().populate(data, bytes) == 0 ? data : nullptr;
}

void ReadableFile::read(std::uint64_t offset, void* data, std::size_t bytes) const {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = system_calls().read(descriptor_, at, std::min(bytes, kLargestCall), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("read", path_);
    if (n == 0) {
      core::fail<core::IoError>("file", "expected ", bytes, " more bytes at ", offset, " in '",
                                path_, "', got its end");
    }
    at += n;
    offset += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
  }
}

std::string read_text(const std::string& path) {
  const ReadableFile file(path);
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

bool exists(const std::string& path) {
  struct stat status {};
  if (system_calls().status(path, status) == 0) return true;
  if (errno != ENOENT) fail_io("look at", path);
  return false;
}

std::uint64_t file_bytes(const std::string& path) {
  return ReadableFile(path).size();
}

std::vector<std::string> list_folder(const std::string& path) {
  std::vector<std::string> names;
  if (system_calls().list(path, names) != 0 && errno != ENOENT) fail_io("list", path);
  return names;
}

void make_folders(const std::string& path) {
  if (path.empty() || exists(path)) return;
  make_folders(std::filesystem::path(path).parent_path().string());
  if (system_calls().make_folder(path) != 0 && errno != EEXIST) fail_io("make the folder", path);
}

void remove_everything(const std::string& path) {
  struct stat status {};
  if (system_calls().status(path, status) != 0) {
    if (errno == ENOENT) return;
    fail_io("look at", path);
  }
  if (!S_ISDIR(status.st_mode)) {
    if (system_calls().remove_file(path) != 0) fail_io("remove", path);
    return;
  }
  for (const std::string& name : list_folder(path)) remove_everything(core::str(path, "/", name));
  if (system_calls().remove_folder(path) != 0) fail_io("remove", path);
}

void check_writable(const std::string& folder, const std::string& probe) {
  const std::string path = core::str(folder, "/", probe);
  const auto message = [&](const core::IoError& e) {
    return core::str("expected a folder that checkpoints can be written to, got '", folder,
                     "': ", e.what());
  };
  try {
    make_folders(folder);
    remove_everything(path);
    WritableFile file(path, WritableFile::Mode::create);
    file.write("probe");
    file.close();
    remove_everything(path);
  } catch (const DiskFull& e) {
    core::fail<DiskFull>("folder", message(e));
  } catch (const core::IoError& e) {
    core::fail<core::IoError>("folder", message(e));
  }
}

void flush_folder(const std::string& path) {
  const int descriptor = open_or_fail(path, O_RDONLY | O_DIRECTORY, "open the folder");
  const int status = system_calls().fsync(descriptor);
  const int reason = errno;
  system_calls().close(descriptor);
  errno = reason;
  // Some network file systems have no such call for folders; their renames are durable by
  // themselves. A parent on a read-only file system has nothing to flush.
  const bool needless = reason == EINVAL || reason == ENOTSUP || reason == EROFS;
  if (status != 0 && !needless) fail_io("flush the folder", path);
}

void flush_parents(const std::string& path) {
  namespace fs = std::filesystem;
  fs::path folder = fs::absolute(path);
  while (folder.has_relative_path()) {
    folder = folder.parent_path();
    const int descriptor = system_calls().open(folder.string(), O_RDONLY | O_DIRECTORY);
    if (descriptor < 0 && errno == EACCES) continue;
    if (descriptor >= 0) system_calls().close(descriptor);
    flush_folder(folder.string());
  }
}

void rename(const std::string& from, const std::string& to) {
  if (system_calls().rename(from, to) != 0) fail_io("rename to", to);
}

}  // namespace cairn::checkpointing
