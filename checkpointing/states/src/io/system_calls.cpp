#include "io/system_calls.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <thread>
#include <utility>

namespace cairn::checkpointing {

namespace {

SystemCalls* real_calls() {
  static SystemCalls calls;
  return &calls;
}

std::atomic<SystemCalls*>& current_calls() {
  static std::atomic<SystemCalls*> calls{real_calls()};
  return calls;
}

}  // namespace

int SystemCalls::open(const std::string& path, int flags) {
  return ::open(path.c_str(), flags | O_CLOEXEC, 0666);
}

ssize_t SystemCalls::read(int file, void* data, std::size_t bytes, std::uint64_t offset) {
  return ::pread(file, data, bytes, static_cast<off_t>(offset));
}

ssize_t SystemCalls::write(int file, const void* data, std::size_t bytes, std::uint64_t offset) {
  return ::pwrite(file, data, bytes, static_cast<off_t>(offset));
}

int SystemCalls::fsync(int file) {
  return ::fsync(file);
}

void SystemCalls::start_flush(int file, std::uint64_t offset, std::size_t bytes) {
#ifdef SYNC_FILE_RANGE_WRITE
  constexpr std::size_t kWorthACall = std::size_t{1} << 20;
  if (bytes < kWorthACall) return;
  (void)::sync_file_range(file, static_cast<off64_t>(offset), static_cast<off64_t>(bytes),
                          SYNC_FILE_RANGE_WRITE);
#endif
}

int SystemCalls::lock(int file) {
  return ::flock(file, LOCK_EX | LOCK_NB);
}
void SystemCalls::sleep(std::chrono::milliseconds time) {
  std::this_thread::sleep_for(time);
}

void* SystemCalls::map(int file, std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  return data == MAP_FAILED ? nullptr : data;
}

int SystemCalls::populate(void* data, std::size_t bytes) {
#ifdef MADV_POPULATE_READ
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(data) / page * page;
  const auto last = reinterpret_cast<std::uintptr_t>(data) + bytes;
  return ::madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_READ);
#else
  errno = ENOSYS;
  return -1;
#endif
}

void SystemCalls::unmap(void* data, std::size_t bytes) {
  ::munmap(data, bytes);
}

int SystemCalls::close(int file) {
  return ::close(file);
}

int SystemCalls::status(int file, struct stat& status) {
  return ::fstat(file, &status);
}

int SystemCalls::status(const std::string& path, struct stat& status) {
  return ::lstat(path.c_str(), &status);
}

int SystemCalls::list(const std::string& folder, std::vector<std::string>& names) {
  DIR* stream = ::opendir(folder.c_str());
  if (stream == nullptr) return -1;
  errno = 0;
  while (const dirent* entry = ::readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int reason = errno;
  ::closedir(stream);
  errno = reason;
  return reason == 0 ? 0 : -1;
}

int SystemCalls::make_folder(const std::string& path) {
  return ::mkdir(path.c_str(), 0777);
}

int SystemCalls::rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}

int SystemCalls::remove_file(const std::string& path) {
  return ::unlink(path.c_str());
}

int SystemCalls::remove_folder(const std::string& path) {
  return ::rmdir(path.c_str());
}

SystemCalls& system_calls() {
  return *current_calls();
}

SystemCallsGuard::SystemCallsGuard(SystemCalls& calls)
    : before_(current_calls().exchange(&calls)) {}

SystemCallsGuard::~SystemCallsGuard() {
  current_calls() = before_;
}

}  // namespace cairn::checkpointing
