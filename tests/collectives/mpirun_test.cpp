// The suite over MPI: ctest starts this program with mpirun, once a rank.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>

#include "parallel/ranks.h"
#include "suite.h"
#include "support/expect_error.h"
#include "support/free_port.h"
#include "tools/shell.h"

namespace cairn::parallel {
namespace {

/// What Open MPI tells its processes, as a job's variables. False in a process of its own.
bool take_place_in_mpirun() {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* port = std::getenv("CAIRN_TEST_PORT");
  if (rank == nullptr || size == nullptr || port == nullptr) return false;
  setenv("RANK", rank, 1);
  setenv("WORLD_SIZE", size, 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", port, 1);
  setenv("CAIRN_JOB_TOKEN", "test", 1);
  setenv("CAIRN_BACKEND", "mpi", 1);
  return true;
}

TEST(Mpirun, DISABLED_HasEveryCollective) {
  ASSERT_TRUE(take_place_in_mpirun());
  auto group = ProcessGroup::from_environment(test::fast_options());
  test::check_collectives(group);
}

#ifdef CAIRN_TEST_MPIRUN
TEST(Mpi, EveryCollectiveUnderMpirun) {
  const std::string command = core::str(
      CAIRN_TEST_MPIRUN,
      " --allow-run-as-root --oversubscribe -np 2 -x CAIRN_TEST_PORT=", test::free_port(),
      " /proc/", getpid(), "/exe --gtest_also_run_disabled_tests --gtest_filter=Mpirun.* 2>&1");
  EXPECT_EQ(std::system(command.c_str()), 0);
}

TEST(Mpi, RanksOfNoMpirunGetAnError) {
  // Each in a folder of its own: processes that Open MPI starts at once race for making one.
  const test::TemporaryFolder folders[2];
  const auto results = test::start_ranks(2, [&](int rank) {
    setenv("OMPI_MCA_orte_tmpdir_base", folders[rank].string().c_str(), 1);
    setenv("CAIRN_BACKEND", "mpi", 1);
    auto group = ProcessGroup::from_environment(test::fast_options());
    test::expect_error<core::CommunicationError>([&] { group.all_reduce(Tensor::zeros({4})); },
                                                 {"processes of one mpirun", "start the job with"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}
#endif

}  // namespace
}  // namespace cairn::parallel
