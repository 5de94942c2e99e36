#include "file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kLargestCall = std::size_t{1}
                                     << 30;  // the kernel moves no more than 2 GiB at once

[[noreturn]] void fail_io(const char* what, const std::string& path) {
  const int reason = errno;
  core::fail<core::IoError>("file", "expected to ", what, " '", path,
                            "', got: ", std::strerror(reason));
}

int open_or_fail(const std::string& path, int flags, const char* what) {
  int descriptor = -1;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) fail_io(what, path);
  return descriptor;
}

}  // namespace

WritableFile::WritableFile(const std::string& path)
    : path_(path), descriptor_(open_or_fail(path, O_WRONLY | O_CREAT | O_TRUNC, "write")) {}

WritableFile::~WritableFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void WritableFile::write(const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(descriptor_, at, std::min(bytes, kLargestCall));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("write", path_);
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void WritableFile::close() {
  if (::fsync(descriptor_) != 0) fail_io("flush", path_);
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) fail_io("close", path_);
}

ReadableFile::ReadableFile(const std::string& path)
    : path_(path), descriptor_(open_or_fail(path, O_RDONLY, "read")) {
  struct stat status {};
  const bool known = ::fstat(descriptor_, &status) == 0;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    return;
  }
  if (known) errno = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  const int reason = errno;
  ::close(descriptor_);
  errno = reason;
  fail_io("read", path_);
}

ReadableFile::~ReadableFile() {
  ::close(descriptor_);
}

void ReadableFile::read(std::uint64_t offset, void* data, std::size_t bytes) const {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n =
        ::pread(descriptor_, at, std::min(bytes, kLargestCall), static_cast<off_t>(offset));
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

void flush_folder(const std::string& path) {
  const int descriptor = open_or_fail(path, O_RDONLY | O_DIRECTORY, "open the folder");
  const int status = ::fsync(descriptor);
  const int reason = errno;
  ::close(descriptor);
  errno = reason;
  // Some network file systems have no such call for folders; their renames are durable by
  // themselves.
  if (status != 0 && reason != EINVAL && reason != ENOTSUP) fail_io("flush the folder", path);
}

void rename_or_exchange(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS) {  // the file system cannot exchange: clear the way first
    std::error_code ignored;
    std::filesystem::remove_all(to, ignored);
  } else if (errno != ENOENT) {
    fail_io("replace", to);
  }
  if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename to", to);
}

}  // namespace cairn::checkpointing
