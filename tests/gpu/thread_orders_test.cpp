// Kernels at sizes at which blocks go on to further work, with the threads of a block in orders
// that hardware may choose.
#include <gmock/gmock.h>

#include "cairn/core/tensor.h"
#include "cairn/kernels/reduce.h"
#include "gpu/sim/simulator.h"
#include "simt/emulator.h"

namespace cairn::test {
namespace {

// A warp that is ahead writes its share of the next row where others still read those of this one.
TEST(ThreadOrders, OfBlocksThatGoOnToASecondRow) {
  gpusim::set_schedule(gpusim::Schedule::early, 1);  // kernels run in this thread
  const Device gpu{DeviceType::cuda, 0};
  constexpr std::int64_t kRows = 16'390, kColumns = 260;  // 16,384 blocks of two warps
  std::vector<double> values, sums;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i < kColumns; ++i) {
      values.push_back(static_cast<double>((row * 7 + i) % 61));
    }
    sums.push_back(0.0);
    for (std::int64_t i = 0; i < kColumns; ++i)
      sums.back() += values[static_cast<std::size_t>(row * kColumns + i)];
  }
  const Tensor x = Tensor::from(values, {kRows, kColumns}, DType::f32, gpu);
  const Tensor y = Tensor::zeros({kRows, 1}, DType::f32, gpu);
  for (const std::uint64_t seed : {1, 2}) {
    simt::schedule() = {simt::Order::shuffled, seed};
    kernels::reduce(kernels::ReduceOp::sum, x, y);
    simt::schedule() = {};
    EXPECT_EQ(y.to_vector(), sums) << seed;
  }
}

}  // namespace
}  // namespace cairn::test
