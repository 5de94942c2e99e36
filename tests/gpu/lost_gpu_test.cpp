// A GPU that is lost in the midst of a step: the step throws, and what ends on the way logs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/sharded.h"
#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

class LostGpuDeathTest : public testing::Test {
 protected:
  LostGpuDeathTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    gpusim::set_schedule(gpusim::Schedule::late, 1);
  }
};

/// A weight with its gradient, and masters and moments on the host.
struct Training {
  Training() : weight(Tensor::full({4000}, 1.0, DType::bf16, kGpu).set_requires_grad(true)) {
    optimizer.set_state_options({.on_host = true});
    step();
  }
  void step() {
    const Tensor gradient = Tensor::full({4000}, 0.5, DType::bf16, kGpu);
    kernels::copy(gradient, weight.gradient_slot().memory());
    weight.gradient_slot().mark_written();
    (void)optimizer.step();
  }

  Tensor weight;
  optim::FusedAdam optimizer{{{"weight", weight}}};
};

/// Ends with 0 where a step throws from the nth call on, and with 1 where none does.
[[noreturn]] void lose(const char* call, std::uint64_t nth) {
  Training training;
  gpusim::inject(call, nth, cudaErrorIllegalAddress);
  try {
    training.step();
  } catch (const core::Error& error) {
    std::fprintf(stderr, "thrown: %s\n", error.what());
    std::_Exit(0);
  }
  std::_Exit(1);
}

TEST_F(LostGpuDeathTest, AStepOfStatesOnTheHostThrows) {
  for (std::uint64_t nth = 1; nth < 5; ++nth) {
    SCOPED_TRACE(nth);
    EXPECT_EXIT(lose("cudaMemcpyAsync", nth), testing::ExitedWithCode(0), "thrown: ");
  }
  // while the window waits for gradients
  EXPECT_EXIT(lose("cudaEventSynchronize", 1), testing::ExitedWithCode(0),
              "weights of cuda:0 may be on their way from the host still: .*\n(.|\n)*thrown: ");
}

void lose_gathered(parallel::ProcessGroup& group) {
  const core::DefaultDeviceGuard device(Device{DeviceType::cuda, group.rank()});
  nn::Sequential net(nn::Linear(7, 30), nn::Linear(30, 3));
  parallel::ShardedDataParallel sharded(net, group, {.stage = parallel::ZeroStage::parameters});
  (void)sharded(normal_tensor({2, 7}, 1));
  {
    const auto whole = sharded.gather_parameters();
    group.barrier();
    if (group.rank() == 0) gpusim::inject("cudaMemcpyAsync", 1, cudaErrorIllegalAddress);
    group.barrier();
  }
  group.check();
}

TEST_F(LostGpuDeathTest, GatheredParametersEndWithoutTerminating) {
  EXPECT_EXIT(
      {
        auto groups = parallel::ProcessGroup::in_process(2);
        std::vector<std::thread> ranks;
        for (auto& group : groups) {
          ranks.emplace_back([&group] {
            try {
              lose_gathered(group);
            } catch (const core::Error& error) {
              std::fprintf(stderr, "thrown: %s\n", error.what());
            }
          });
        }
        for (std::thread& rank : ranks) rank.join();
        std::_Exit(0);
      },
      testing::ExitedWithCode(0), "weights that were gathered are lost: (.|\n)*thrown: ");
}

}  // namespace
}  // namespace cairn::test
