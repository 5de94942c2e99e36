#include "cairn/core/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace cairn::core {

namespace {

#if defined(_OPENMP)
int default_threads() {
  return omp_get_max_threads();
}
bool inside_loop() {
  return omp_in_parallel() != 0;
}
#else
int default_threads() {
  return 1;
}
bool inside_loop() {
  return true;
}
#endif

std::atomic<int>& thread_setting() {
  static std::atomic<int> threads{default_threads()};
  return threads;
}

// The exception of the first chunk that threw, so that the caller sees the same one on any number
// of threads.
class FirstError {
 public:
  void keep(std::int64_t chunk, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_ && chunk_ < chunk) return;
    error_ = std::move(error);
    chunk_ = chunk;
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  std::int64_t chunk_ = 0;
};

}  // namespace

int num_threads() {
  return thread_setting();
}

void set_num_threads(int n) {
  thread_setting() = std::max(n, 1);
}

void parallel_for(std::int64_t n, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  grain = std::max<std::int64_t>(grain, 1);
  const std::int64_t chunks = n <= 0 ? 0 : (n - 1) / grain + 1;
  auto run = [&](std::int64_t chunk) { body(chunk * grain, std::min(n, (chunk + 1) * grain)); };
  const int threads = static_cast<int>(std::min<std::int64_t>(chunks, num_threads()));
  if (threads <= 1 || inside_loop()) {
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
    return;
  }
#if defined(_OPENMP)
  FirstError first_error;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    try {
      run(chunk);
    } catch (...) {
      first_error.keep(chunk, std::current_exception());
    }
  }
  first_error.rethrow();
#endif
}

#if defined(_OPENMP)
// Nobody can tell OpenMP to wait otherwise once it runs. But where it has more threads than there
// are processors, GCC's spins 100 times instead of 300,000 (GOMP_SPINCOUNT in its manual), and
// LLVM's not at all: these are the threads too many, and do nothing.
class PassiveWaitGuard::SleepingTeam {
 public:
  SleepingTeam() : thread_([this] { run(); }) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stands_; });
  }
  ~SleepingTeam() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  SleepingTeam(const SleepingTeam&) = delete;
  SleepingTeam& operator=(const SleepingTeam&) = delete;

 private:
  void run() {
    omp_set_dynamic(0);  // of this thread alone
#pragma omp parallel num_threads(omp_get_num_procs() + 1)
    {
      std::unique_lock lock(mutex_);
      stands_ = true;  // OpenMP counts all before the first runs
      changed_.notify_all();
      changed_.wait(lock, [this] { return ends_; });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stands_ = false, ends_ = false;
  std::thread thread_;  // last: it uses all the others
};

PassiveWaitGuard::PassiveWaitGuard() {
  if (omp_get_max_threads() > 1) team_ = std::make_unique<SleepingTeam>();
}
#else
class PassiveWaitGuard::SleepingTeam {};

PassiveWaitGuard::PassiveWaitGuard() = default;  // one thread waits for nobody
#endif

PassiveWaitGuard::~PassiveWaitGuard() = default;

}  // namespace cairn::core
