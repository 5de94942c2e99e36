#include "cairn/core/run_folder.h"

#include <atomic>
#include <mutex>

namespace cairn::core {

namespace {

// Never destroyed: a job may break while static objects end.
struct RunFolder {
  std::mutex mutex;
  std::string path;
  std::atomic<bool> there = false;
};
RunFolder& only_run_folder() {
  static auto* const only = new RunFolder;
  return *only;
}

}  // namespace

std::string run_folder() {
  const std::lock_guard lock(only_run_folder().mutex);
  return only_run_folder().path;
}

void set_run_folder(const std::string& folder) {
  const std::lock_guard lock(only_run_folder().mutex);
  only_run_folder().path = folder;
  only_run_folder().there = !folder.empty();
}

bool has_run_folder() {
  return only_run_folder().there.load(std::memory_order_relaxed);
}

}  // namespace cairn::core
