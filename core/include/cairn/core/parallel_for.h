// Data-parallel loops over the processor's threads (OpenMP). Work is cut into the same chunks for
// any number of threads, so a loop whose chunks write apart, or whose partial results are combined
// in chunk order, gives the same bits on 1 and on 64 cores.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace cairn::core {

int num_threads();  // OMP_NUM_THREADS, or the processor's cores
void set_num_threads(int n);

/// Calls body(begin, end) for chunks of [0, n) of at most `grain` elements, on all threads; a
/// single chunk runs in this thread. What a chunk throws is rethrown here.
void parallel_for(std::int64_t n, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body);

/// While one lives, threads of loops (oneDNN's too) that wait for each other sleep at once. Else
/// they spin for some milliseconds, as OMP_WAIT_POLICY says, which is faster where the process has
/// its processors to itself; beside other programs they keep them from the threads that they wait
/// for.
class [[nodiscard]] PassiveWaitGuard {
 public:
  PassiveWaitGuard();
  ~PassiveWaitGuard();
  PassiveWaitGuard(const PassiveWaitGuard&) = delete;
  PassiveWaitGuard& operator=(const PassiveWaitGuard&) = delete;

 private:
  class SleepingTeam;
  std::unique_ptr<SleepingTeam> team_;
};

}  // namespace cairn::core
