#include "cairn/core/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cairn::log {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST(Log, FormatsArgumentsInOrder) {
  EXPECT_EQ(detail::format("{} of {}: {}", 1, 2.5, "x"), "1 of 2.5: x");
  EXPECT_EQ(detail::format("{}", "{}"), "{}");
  EXPECT_EQ(detail::format("no braces", 3), "no braces");
}

TEST(Log, WritesTimeLevelAndTextToStandardError) {
  set_level(Level::info);
  ::testing::internal::CaptureStderr();
  warn("loss is {}", "nan");
  debug("unseen");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, MatchesRegex("\\[[0-9]+:[0-9]+:[0-9]+ warn\\] loss is nan\n"));
}

TEST(Log, OffIsSilent) {
  ::testing::internal::CaptureStderr();
  set_level(Level::off);
  error("unseen");
  set_level(Level::info);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace cairn::log
