// Copies between GPUs: directly where one has access to the other's memory, through the host where
// not (Gpu.without_peer_access runs these with CAIRN_SIM_PEERS=0), in the order of both streams.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/peers.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/copy.h"
#include "gpu/sim/simulator.h"

namespace cairn::test {
namespace {

constexpr Device kOne{DeviceType::cuda, 0}, kOther{DeviceType::cuda, 1};

const bool kHasPeers = [] {
  const char* const text = std::getenv("CAIRN_SIM_PEERS");
  return text == nullptr || std::string(text) != "0";
}();

class Peers : public testing::TestWithParam<gpusim::Schedule> {
 protected:
  Peers() { gpusim::set_schedule(GetParam(), 5); }
};
constexpr auto kAll = {gpusim::Schedule::late, gpusim::Schedule::early, gpusim::Schedule::shuffled};
INSTANTIATE_TEST_SUITE_P(Schedules, Peers, testing::ValuesIn(kAll));

Tensor counting(const Shape& shape, DType dtype, Device device) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i) values.push_back(static_cast<double>(i % 100));
  return Tensor::from(values, shape, dtype, device);
}

/// The works of a copy, but for waits.
std::vector<std::string> works_of(const TensorView& x, const TensorView& y) {
  gpusim::begin_trace();
  kernels::copy(x, y);
  std::vector<std::string> names;
  for (const gpusim::TracedWork& work : gpusim::end_trace()) names.push_back(work.name);
  return names;
}

TEST_P(Peers, AreAskedForOnce) {
  EXPECT_EQ(core::reaches(kOne, kOther), kHasPeers);
  const auto asked = gpusim::counters().calls["cudaDeviceCanAccessPeer"];
  EXPECT_EQ(core::reaches(kOne, kOther), kHasPeers);
  EXPECT_EQ(gpusim::counters().calls["cudaDeviceCanAccessPeer"], asked);
  EXPECT_TRUE(core::reaches(kOne, kOne));
  EXPECT_FALSE(core::reaches(kOne, Device{}));
  EXPECT_TRUE(core::reaches(Device{}, Device{}));
}

TEST_P(Peers, CopyBytesInOneWork) {
  const Tensor x = counting({300}, DType::f32, kOne), y = Tensor::zeros({300}, DType::f32, kOther);
  gpusim::begin_trace();
  core::copy_bytes(x, y);
  const auto works = gpusim::end_trace();
  ASSERT_EQ(works.size(), 1u);
  EXPECT_EQ(works[0].name,
            kHasPeers ? "cudaMemcpyPeerAsync" : "cudaMemcpyPeerAsync through the host");
  EXPECT_EQ(y.to_vector(), x.to_vector());
}

TEST_P(Peers, CopyRowsThatLieApartAndConvertInOneKernel) {
  const Tensor x = counting({40, 30}, DType::f32, kOne);
  const Tensor y = Tensor::zeros({30, 40}, DType::f16, kOther);
  const auto works = works_of(x.view().transpose(0, 1), y);
  if (kHasPeers) {
    EXPECT_THAT(works, testing::ElementsAre("kernel in copy"));
  } else {
    EXPECT_THAT(works, testing::Contains("cudaMemcpyPeerAsync through the host"));
  }
  std::vector<double> expected;
  const std::vector<double> from = x.to_vector();
  for (std::size_t column = 0; column < 30; ++column) {
    for (std::size_t row = 0; row < 40; ++row) expected.push_back(from[row * 30 + column]);
  }
  EXPECT_EQ(y.to_vector(), expected);
}

// What is not ordered races.
TEST_P(Peers, AreInTheOrderOfBothStreams) {
  const core::Stream streams[] = {core::Stream::create(kOne), core::Stream::create(kOther)};
  const core::StreamGuard one(streams[0]), other(streams[1]);
  for (const bool as_bytes : {true, false}) {
    const Tensor x = Tensor::zeros({5000}, DType::f32, kOne);
    const Tensor y = Tensor::zeros({5000}, as_bytes ? DType::f32 : DType::f16, kOther);
    for (int k = 1; k < 4; ++k) {
      kernels::fill(x, k);
      as_bytes ? core::copy_bytes(x, y) : kernels::copy(x, y);
      kernels::fill(x, -1.0);  // after it was read
      EXPECT_THAT(y.to_vector(), testing::Each(k));
      kernels::fill(y, -2.0);
    }
  }
}

// A block goes back to its own GPU's stream, which the copy has been in.
TEST_P(Peers, ASourceMayEndWhileItIsCopied) {
  const Tensor y = Tensor::zeros({5000}, DType::f16, kOther);
  for (int k = 1; k < 4; ++k) {
    kernels::copy(Tensor::full({5000}, k, DType::f32, kOne), y);
    const Tensor next = Tensor::full({5000}, -1.0, DType::f32, kOne);
    EXPECT_THAT(y.to_vector(), testing::Each(k));
  }
}

TEST_P(Peers, AreNotCapturedInAGraphOfOneGpu) {
  const Tensor x = counting({300}, DType::f32, kOne);
  for (const DType to : {DType::f32, DType::f16}) {
    const Tensor y = Tensor::zeros({300}, to, kOther);
    core::Graph graph(kOther);
    const auto work = [&] { kernels::copy(x, y); };
    graph.warm_up(work);
    EXPECT_THROW(graph.capture(work), core::Unsupported);
    EXPECT_THAT(y.to_vector(), testing::ElementsAreArray(x.to_vector()));
  }
}

}  // namespace
}  // namespace cairn::test
