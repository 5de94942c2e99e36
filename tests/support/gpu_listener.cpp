// Linked into every test program of the simulated GPU: a test whose name says cuda must have given
// a GPU something to do.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gpu/sim/simulator.h"

namespace cairn::test {
namespace {

std::uint64_t work_so_far() {
  const gpusim::Counters counters = gpusim::counters();
  std::uint64_t work = counters.kernels;
  for (const char* call : {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamCreateWithFlags"}) {
    if (const auto found = counters.calls.find(call); found != counters.calls.end()) {
      work += found->second;
    }
  }
  return work;
}

class MustWork : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { before_ = work_so_far(); }
  void OnTestEnd(const testing::TestInfo& test) override {
    const std::string name = std::string(test.test_suite_name()) + "." + test.name();
    const bool wants_work =
        name.find("cuda") != std::string::npos && name.find("Empty") == std::string::npos;
    if (!wants_work || !test.result()->Passed()) return;
    EXPECT_GT(work_so_far(), before_) << "a test on cuda that gave the GPU nothing to do";
  }
  void OnTestProgramEnd(const testing::UnitTest& program) override {
    if (std::getenv("CAIRN_TEST_DEVICE") == nullptr || program.successful_test_count() == 0) return;
    if (gpusim::counters().kernels > 0) return;
    std::fprintf(stderr, "expected the tests on CAIRN_TEST_DEVICE to launch kernels, got none\n");
    std::_Exit(1);
  }
  std::uint64_t before_ = 0;
};

const bool listening = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new MustWork);
  return true;
}();

}  // namespace
}  // namespace cairn::test
