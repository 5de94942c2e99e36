// peer_mpi BYTES, under mpirun: times MPI_Allreduce of f32 (sum, in place). One JSON line of rank
// 0's.
#include <mpi.h>

#include <cstdlib>

#include "ranks.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  bench::bind_to_core(rank);
  const auto bytes = static_cast<std::size_t>(std::atoll(argc == 2 ? argv[1] : "1024"));
  std::vector<float> x(bytes / 4, 0.0f);
  const bench::Times times = bench::time_runs(bench::repeats_of(bytes), [&] {
    MPI_Allreduce(MPI_IN_PLACE, x.data(), static_cast<int>(x.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  });
  if (rank == 0) bench::print(times);
  MPI_Finalize();
  return 0;
}
