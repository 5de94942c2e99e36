// all_reduce between two processes of this host: shared memory beside Gloo over loopback, by turns in
// one run. Prints the medians and their ratio.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"

namespace {

using namespace cairn;
using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;

/// Median microseconds of an all_reduce of n f32.
double median_us(const parallel::ProcessGroup& group, std::int64_t n, int repeats) {
  const Tensor x = Tensor::full({n}, 1.0);
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    const auto begin = Clock::now();
    group.all_reduce(x, parallel::ReduceOp::mean, "x");
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    if (i >= 3) times.push_back(us);
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<std::size_t>(repeats / 2)];
}

int run_rank(int rank, const std::string& backend, int port, int result) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  setenv("CAIRN_BACKEND", backend.c_str(), 1);
  const auto group = parallel::ProcessGroup::from_environment();
  const double times[] = {median_us(group, 25 << 18, 15), median_us(group, 256, 2000)};
  const bool written = rank != 0 || write(result, times, sizeof times) == sizeof times;
  return written ? 0 : 1;
}

/// Large and small, in microseconds.
std::vector<double> run_job(const std::string& backend, int port) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  for (int rank = 0; rank < 2; ++rank) {
    if (fork() == 0) _exit(run_rank(rank, backend, port, ends[1]));
  }
  close(ends[1]);
  std::vector<double> times(2);
  const bool got = read(ends[0], times.data(), 16) == 16;
  close(ends[0]);
  for (int rank = 0; rank < 2; ++rank) wait(nullptr);
  return got ? times : std::vector<double>{};
}

}  // namespace

int main(int argc, char** argv) {
  const int port = argc > 1 ? std::atoi(argv[1]) : 29'400;
  std::vector<double> ratios;
  for (int round = 0; round < kRounds; ++round) {
    const auto shm = run_job("shm", port + 2 * round), gloo = run_job("gloo", port + 2 * round + 1);
    if (shm.empty() || gloo.empty()) return 1;
    std::printf("25 MiB: shm %.2f ms, gloo %.2f ms, ratio %.2f; 1 KiB: shm %.1f us, gloo %.1f us\n",
                shm[0] / 1000, gloo[0] / 1000, gloo[0] / shm[0], shm[1], gloo[1]);
    ratios.push_back(gloo[0] / shm[0]);
  }
  std::nth_element(ratios.begin(), ratios.begin() + kRounds / 2, ratios.end());
  std::printf("median ratio %.2f\n", ratios[kRounds / 2]);
  return 0;
}
