#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

namespace {

[[noreturn]] void fail_map(const std::string& path, int reason) {
  core::fail<core::IoError>("file", "expected to read '", path, "', got: ", std::strerror(reason));
}

struct MappedDescriptor {
  int value;
  ~MappedDescriptor() {
    if (value >= 0) close(value);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const MappedDescriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  struct stat status {};
  if (file.value < 0 || fstat(file.value, &status) != 0) fail_map(path, errno);
  if (!S_ISREG(status.st_mode)) fail_map(path, S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
  size_ = static_cast<std::uint64_t>(status.st_size);
  if (size_ == 0) return;
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.value, 0);
  if (memory == MAP_FAILED) fail_map(path, errno);
  data_ = static_cast<char*>(memory);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace cairn::checkpointing
