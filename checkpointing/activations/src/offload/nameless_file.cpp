#include "offload/nameless_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

namespace {

class NamelessFile {
 public:
  explicit NamelessFile(const std::string& folder) : folder_(folder) {
    // A file system without O_TMPFILE gets a name for a moment.
    file_ = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file_ >= 0) return;
    if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) fail("create a file", errno);
    std::string name = folder + "/cairn-offload-XXXXXX";
    file_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (file_ < 0) fail("create a file", errno);
    ::unlink(name.c_str());
  }
  ~NamelessFile() { ::close(file_); }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;

  void reserve(std::size_t bytes) {
    // A full disk is found here, not by a signal at the first write.
    const int error = ::posix_fallocate(file_, 0, static_cast<off_t>(bytes));
    if (error != 0) fail(core::str("reserve ", bytes, " bytes"), error);
  }

  void* map(std::size_t bytes) {
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) fail(core::str("map ", bytes, " bytes"), errno);
    return memory;
  }

 private:
  [[noreturn]] void fail(const std::string& what, int error) const {
    core::fail<core::IoError>("offload", "expected to ", what, " in ", folder_,
                              ", got: ", std::strerror(error),
                              " (OffloadOptions::folder can be a folder with more room)");
  }

  std::string folder_;
  int file_ = -1;
};

}  // namespace

std::shared_ptr<void> map_nameless_file(const std::string& folder, std::size_t bytes) {
  NamelessFile file(folder);
  file.reserve(bytes);
  return {file.map(bytes), [bytes](void* memory) { ::munmap(memory, bytes); }};
}

void leave_to_file(void* memory, std::size_t bytes) {
  ::madvise(memory, bytes, MADV_DONTNEED);  // of a shared mapping: the file keeps what was written
}

}  // namespace cairn::checkpointing
