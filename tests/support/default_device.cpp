// Linked into every test program. CAIRN_TEST_DEVICE=cuda:0 makes tensors and modules that a test
// gives no device there. Products are not timed, so that bits, and those of programs that a test
// starts, do not depend on the machine's load; CAIRN_PRODUCTS says otherwise where it is set. On
// simulated GPUs each block is memory of its own, where every access beyond it is seen;
// CAIRN_SEGMENTS=1 has them as users do.
#include <gtest/gtest.h>

#include <stdlib.h>

#include <memory>

#include "cairn/core/device.h"

namespace cairn::test {
namespace {

class DefaultDevice : public testing::Environment {
  void SetUp() override {
    for (const char* const name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"})
      unsetenv(name);  // programs that a test starts run what it says
    const char* const name = getenv("CAIRN_TEST_DEVICE");
    if (name != nullptr) guard_ = std::make_unique<core::DefaultDeviceGuard>(Device::parse(name));
  }
  void TearDown() override { guard_.reset(); }
  std::unique_ptr<core::DefaultDeviceGuard> guard_;
};

[[maybe_unused]] const int products = setenv("CAIRN_PRODUCTS", "default", /*overwrite=*/0);
[[maybe_unused]] const int segments = setenv("CAIRN_SEGMENTS", "0", /*overwrite=*/0);
const auto* const environment = testing::AddGlobalTestEnvironment(new DefaultDevice);

}  // namespace
}  // namespace cairn::test
