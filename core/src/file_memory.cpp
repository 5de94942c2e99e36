#include "cairn/core/file_memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "cairn/core/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace cairn::core {

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
    const int error = ::posix_fallocate(file_, 0, static_cast<off_t>(bytes));
    if (error != 0) fail(str("reserve ", bytes, " bytes"), error);
  }

  void* map(std::size_t bytes) {
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) fail(str("map ", bytes, " bytes"), errno);
    return memory;
  }

 private:
  [[noreturn]] void fail(const std::string& what, int error) const {
    core::fail<IoError>("offload", "expected to ", what, " in ", folder_,
                        ", got: ", std::strerror(error),
                        " (give it a folder that is there, can be written to and has more room)");
  }

  std::string folder_;
  int file_ = -1;
};

/// All blocks: where each begins, and its bytes.
struct Blocks {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> blocks;
};
Blocks& blocks_in_files() {
  static auto* blocks = new Blocks;  // storages in static objects outlive everything here
  return *blocks;
}

void unmap_block(void* memory, std::size_t bytes) {
  Blocks& all = blocks_in_files();
  {
    const std::lock_guard lock(all.mutex);
    all.blocks.erase(reinterpret_cast<std::uintptr_t>(memory));
  }
  ::munmap(memory, bytes);
}

/// The pages that hold a view's elements; none where it lies elsewhere.
struct Pages {
  void* begin = nullptr;
  std::size_t bytes = 0;
};

Pages pages_of(const TensorView& x) {
  const auto begin = reinterpret_cast<std::uintptr_t>(x.data);
  if (!lies_in_file(x)) return {};
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = begin / page * page;
  return {reinterpret_cast<void*>(first), begin + x.nbytes() - first};
}

}  // namespace

std::shared_ptr<void> allocate_in_file(const std::string& folder, std::size_t bytes) {
  CAIRN_CHECK(bytes > 0, "offload", "expected a size > 0 to take in ", folder, ", got 0");
  NamelessFile file(folder);
  file.reserve(bytes);
  void* const memory = file.map(bytes);
  std::shared_ptr<void> owner(memory, [bytes](void* p) { unmap_block(p, bytes); });
  Blocks& all = blocks_in_files();
  const std::lock_guard lock(all.mutex);
  all.blocks[reinterpret_cast<std::uintptr_t>(memory)] = bytes;
  return owner;
}

bool lies_in_file(const TensorView& x) {
  const auto address = reinterpret_cast<std::uintptr_t>(x.data);
  Blocks& all = blocks_in_files();
  const std::lock_guard lock(all.mutex);
  const auto after = all.blocks.upper_bound(address);
  if (x.device.is_cuda() || after == all.blocks.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes;
}

void fetch_from_file(const TensorView& x) {
  const Pages pages = pages_of(x);
  if (pages.bytes == 0) return;
  if (::madvise(pages.begin, pages.bytes, MADV_POPULATE_WRITE) == 0) return;
  const int error = errno;
  if (error == EINVAL) {  // of an older system: they come in as they are touched
    ::madvise(pages.begin, pages.bytes, MADV_WILLNEED);
    return;
  }
  fail<IoError>("offload", "expected to read ", pages.bytes,
                " bytes of a file, got: ", std::strerror(error),
                " (the disk fails, or the machine has no memory left)");
}

void leave_to_file(const TensorView& x) {
  const Pages pages = pages_of(x);
  if (pages.bytes == 0) return;
  ::madvise(pages.begin, pages.bytes, MADV_DONTNEED);  // of a shared mapping: nothing is lost
}

}  // namespace cairn::core
