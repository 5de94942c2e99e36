// all_reduce RANKS BYTES BACKEND PORT: times an all_reduce of f32 (mean, in place) between
// processes of this host, by Cairn's engine BACKEND (shm or gloo). One JSON line.
#include <cstdlib>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "ranks.h"

int main(int argc, char** argv) {
  using namespace cairn;
  if (argc != 5) {
    std::fprintf(stderr, "expected RANKS BYTES BACKEND PORT\n");
    return 2;
  }
  const int ranks = std::atoi(argv[1]);
  const auto bytes = static_cast<std::size_t>(std::atoll(argv[2]));
  setenv("WORLD_SIZE", argv[1], 1);
  setenv("CAIRN_BACKEND", argv[3], 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", argv[4], 1);
  return bench::run_ranks(ranks, [&](int rank) {
    bench::bind_to_core(rank);
    setenv("RANK", std::to_string(rank).c_str(), 1);
    const auto group = parallel::ProcessGroup::from_environment();
    const Tensor x = Tensor::full({static_cast<std::int64_t>(bytes / 4)}, 1.0);
    const bench::Times times = bench::time_runs(
        bench::repeats_of(bytes), [&] { group.all_reduce(x, parallel::ReduceOp::mean, "x"); });
    group.barrier();
    if (rank == 0) bench::print(times);
  });
}
