// Linked into every test program: CAIRN_TEST_DEVICE=cuda:0 makes tensors and modules that a test
// gives no device there.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "cairn/core/device.h"

namespace cairn::test {
namespace {

class DefaultDevice : public testing::Environment {
  void SetUp() override {
    const char* const name = std::getenv("CAIRN_TEST_DEVICE");
    if (name != nullptr) guard_ = std::make_unique<core::DefaultDeviceGuard>(Device::parse(name));
  }
  void TearDown() override { guard_.reset(); }
  std::unique_ptr<core::DefaultDeviceGuard> guard_;
};

const auto* const environment = testing::AddGlobalTestEnvironment(new DefaultDevice);

}  // namespace
}  // namespace cairn::test
