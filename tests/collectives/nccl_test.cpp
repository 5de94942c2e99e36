// The suite over NCCL: on two GPUs, real ones or simulated.
#include <gtest/gtest.h>

#include <cstdlib>

#include "cairn/core/device.h"
#include "parallel/ranks.h"
#include "suite.h"

namespace cairn::parallel {
namespace {

#ifdef CAIRN_SIMULATED_GPUS
const bool kConfigured = setenv("CAIRN_SIM_GPUS", "2", 0) == 0;  // before the first call
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

}  // namespace
}  // namespace cairn::parallel
