// The suite over NCCL: on two GPUs, real ones or simulated.
#include <gtest/gtest.h>

#include <cstdlib>

#include "cairn/core/device.h"
#include "parallel/ranks.h"
#include "suite.h"

namespace cairn::parallel {
namespace {

#ifdef CAIRN_SIMULATED_GPUS
const bool kConfigured = setenv("CAIRN_SIM_GPUS", "4", 0) == 0;  // before the first call
#endif

TEST(NcclEngine, HasEveryCollective) {
  if (core::device_count(core::DeviceType::cuda) < 2) GTEST_SKIP() << "needs two GPUs";
  test::run_ranks(2, [](ProcessGroup& group) {
    const core::DefaultDeviceGuard guard(group.device("cuda"));
    for (const DType dtype : {DType::f32, DType::bf16, DType::i64, DType::u8}) {
      for (const std::int64_t n : {0, 1, 17, 1003}) {
        test::check_reductions(group, n, dtype);
        test::check_movements(group, n, dtype);
      }
      for (const std::int64_t n : {0, 3, 901}) test::check_uneven(group, n, dtype);
    }
    test::check_movements(group, 17, DType::i16);
    const Tensor x = test::pattern(group.rank(), 1000, DType::f32);
    if (group.rank() == 0) group.send(x, 1, 3);
    if (group.rank() == 1) {
      group.recv(x, 0, 3);
      EXPECT_EQ(x.to_vector(), test::pattern(0, 1000, DType::f32).to_vector());
    }
    group.wait();
    group.barrier("end");
  });
}

// Four ranks find each other by two ids; parts of a group that is connected are split from it.
TEST(NcclEngine, SplitsGroupsThatAreConnectedAndThatAreNot) {
  if (core::device_count(core::DeviceType::cuda) < 4) GTEST_SKIP() << "needs four GPUs";
  test::run_ranks(4, [](ProcessGroup& group) {
    const int rank = group.rank();
    const core::DefaultDeviceGuard guard(group.device("cuda"));
    const auto sum_in = [&](const ProcessGroup& part) {
      const Tensor x = Tensor::full({1000}, rank + 1.0);
      part.all_reduce(x, ReduceOp::sum, "x");
      part.wait();
      return x.to_vector()[999];
    };
    const ProcessGroup early = group.split(rank % 2, 0, "early");
    EXPECT_EQ(sum_in(group), 10.0);
    const ProcessGroup late = group.split(rank / 2, -rank, "late"), alone = late.split(rank);
    const ProcessGroup three = group.split(rank == 2 ? 7 : -7);
    EXPECT_EQ(sum_in(early), rank % 2 == 0 ? 4.0 : 6.0);
    EXPECT_EQ(sum_in(late), rank / 2 == 0 ? 3.0 : 7.0);
    EXPECT_EQ(sum_in(three), rank == 2 ? 3.0 : 7.0);
    EXPECT_EQ(sum_in(alone), rank + 1.0);
    const Tensor x = Tensor::full({3}, static_cast<double>(rank));
    late.broadcast(x, 0, "of the highest, by its key");
    late.wait();
    EXPECT_EQ(x.to_vector()[0], rank / 2 == 0 ? 1.0 : 3.0);
  });
}

}  // namespace
}  // namespace cairn::parallel
