// Memory that is freed while its GPU does not answer: the allocator's lists stay whole.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "gpu/vendor_support.h"
#include "support/message_of.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr std::int64_t kElements = 5000;

/// Asked where a block is freed that another stream uses.
const char* const kQuestions[] = {"cudaStreamIsCapturing", "cudaStreamQuery",
                                  "cudaEventCreateWithFlags", "cudaEventRecord"};

class FreedMemory : public testing::Test {
 protected:
  FreedMemory() : beside_(core::Stream::create(kGpu, "beside")) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    gpusim::set_schedule(gpusim::Schedule::late, 1);
  }
  ~FreedMemory() override { gpusim::clear_injected(); }

  /// What another stream uses, and goes on using for a while.
  Tensor used_beside() const {
    Tensor x = Tensor::full({kElements}, 1.0, DType::f32, kGpu);
    core::Event written(kGpu);
    written.record(core::Stream::current(kGpu));
    beside_.wait(written);
    const core::StreamGuard guard(beside_);
    kernels::fill(x, 2.0);
    x.storage()->record_use(beside_);
    return x;
  }

  core::Stream beside_;
};

const void* address_of(const Tensor& x) {
  return x.storage()->data();
}

Tensor new_block() {
  return Tensor::empty({kElements}, DType::f32, kGpu);
}

std::string report() {
  core::reset_peak_memory(kGpu);
  return core::memory_report(kGpu);
}

TEST_F(FreedMemory, WhoseStreamDoesNotAnswerIsCountedAndComesBack) {
  const Tensor other = Tensor::zeros({10}, DType::f32, kGpu);
  used_beside();
  beside_.synchronize();
  core::release_cached_memory(kGpu);
  for (const char* question : kQuestions) {
    SCOPED_TRACE(question);
    Tensor x = used_beside();
    const void* const address = address_of(x);
    x = {};
    beside_.synchronize();
    new_block();  // looks what is done
    const std::string before = report();

    x = used_beside();
    EXPECT_EQ(address_of(x), address);
    const CallCount asked(question);
    gpusim::inject(question, 1, cudaErrorInvalidValue);
    x = {};
    EXPECT_GE(asked(), 1u);
    EXPECT_EQ(report(), before);
    EXPECT_NE(address_of(new_block()), address) << "in use";
    beside_.synchronize();
    const Tensor first = new_block();
    const Tensor second = new_block();
    EXPECT_TRUE(address_of(first) == address || address_of(second) == address) << "lost";
  }
}

TEST_F(FreedMemory, WhoseEventDoesNotAnswerIsNotHandedOut) {
  Tensor x = used_beside();
  const void* const address = address_of(x);
  x = {};
  beside_.synchronize();
  const CallCount asked("cudaEventQuery");
  gpusim::inject("cudaEventQuery", 1, cudaErrorInvalidValue);
  const Tensor first = new_block();
  EXPECT_EQ(asked(), 1u);
  EXPECT_NE(address_of(first), address);
  EXPECT_EQ(address_of(new_block()), address);
}

/// No later call of the process succeeds.
TEST_F(FreedMemory, OfALostGpuLeavesReportsThatEnd) {
  for (const char* question : kQuestions) {
    SCOPED_TRACE(question);
    EXPECT_EXIT(
        {
          const Tensor kept = Tensor::zeros({kElements}, DType::f32, kGpu);
          Tensor x = used_beside();
          gpusim::inject(question, 1, cudaErrorIllegalAddress);
          x = {};
          std::fputs(core::memory_report(kGpu).c_str(), stderr);
          core::set_memory_capacity(kGpu, 1 << 20);
          std::fputs(message_of<core::OutOfMemory>([] {
                       Tensor::empty({1 << 20}, DType::f32, kGpu);
                     }).c_str(),
                     stderr);
          std::_Exit(0);
        },
        testing::ExitedWithCode(0),
        "largest of 1 live blocks: 19.5 KiB(.|\n)*expected at most "
        "(.|\n)*largest of 1 live blocks: 19.5 KiB");
  }
}

}  // namespace
}  // namespace cairn::test
