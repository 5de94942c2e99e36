#include "cairn/core/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/core/error.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;

using ::testing::HasSubstr;

TEST(Device, ParsesWhatExists) {
  EXPECT_EQ(Device::parse("cpu"), (Device{DeviceType::cpu, 0}));
  EXPECT_EQ(Device::parse("cpu:2"), (Device{DeviceType::cpu, 2}));
  EXPECT_EQ(to_string(Device::parse("cpu:1")), "cpu:1");
  EXPECT_EQ(device_count(DeviceType::cpu), 3);
}

TEST(Device, UnknownOneNamesThoseThereAre) {
  for (const char* text : {"cpu:3", "gpu", "cpu:", "cpu:-1", "cpu:1x", "", "cpu:99999999999"}) {
    const std::string message = message_of<InvalidArgument>([&] { Device::parse(text); });
    EXPECT_THAT(message, HasSubstr("[device] expected one of cpu:0 ... cpu:2"));
    EXPECT_THAT(message, HasSubstr(std::string("got \"") + text + "\""));
  }
  EXPECT_THAT(message_of<InvalidArgument>([] { Device::parse("cpu:3"); }),
              HasSubstr("CAIRN_CPU_DEVICES"));
}

TEST(Device, AbsentCudaSaysWhy) {
  if (cuda_available()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_EQ(device_count(DeviceType::cuda), 0);
  EXPECT_THAT(message_of<InvalidArgument>([] { Device::parse("cuda:0"); }), HasSubstr("CUDA"));
}

}  // namespace
}  // namespace cairn::core
