#include "io/work_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace cairn::checkpointing {

int threads_for(std::uint64_t bytes, std::uint64_t most) {
  constexpr std::uint64_t kWorthAThread = std::uint64_t{8} << 20;
  const std::uint64_t cores = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(
      std::clamp<std::uint64_t>(bytes / kWorthAThread, 1, std::min(most, cores)));
}

void on_threads(int threads, std::size_t jobs, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  const auto run = [&] {
    try {
      for (std::size_t i = next++; i < jobs; i = next++) work(i);
    } catch (...) {
      next = jobs;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads && static_cast<std::size_t>(i) < jobs; ++i) {
      others.emplace_back(run);
    }
  } catch (const std::system_error&) {  // no more threads: those that run do it all
  }
  run();
  for (std::thread& other : others) other.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace cairn::checkpointing
