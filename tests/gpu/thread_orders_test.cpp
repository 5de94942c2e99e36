// Kernels at sizes at which blocks go on to further work, with the threads of a block in orders
// that hardware may choose.
#include <gmock/gmock.h>

#include <numeric>

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
  constexpr std::int64_t kRows = 16'390, kColumns = 1'028;  // 16,384 blocks of two warps
  std::vector<double> values(kRows + kColumns), sums;       // each row begins at the next value
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i * i * 7 % 61);
  for (auto row = values.begin(); row != values.end() - kColumns; ++row) {
    sums.push_back(std::accumulate(row, row + kColumns, 0.0));
  }
  const Tensor memory = Tensor::from(values, {kRows + kColumns}, DType::f32, gpu);
  TensorView x = memory;
  x.shape = {kRows, kColumns}, x.strides = {1, 1};
  const Tensor y = Tensor::zeros({kRows, 1}, DType::f32, gpu);
  for (const std::uint64_t seed : {1, 2}) {
    simt::schedule() = {simt::Order::shuffled, seed};
    kernels::reduce(kernels::ReductionKind::sum, x, y);
    simt::schedule() = {};
    EXPECT_EQ(y.to_vector(), sums) << seed;
  }
}

}  // namespace
}  // namespace cairn::test
