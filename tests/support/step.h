#pragma once

#include <gtest/gtest.h>

#include "cairn/optim/optimizer.h"

namespace cairn::test {

inline void expect_applied(const optim::StepResult& result) {
  EXPECT_TRUE(result.applied) << result.reason;
}

}  // namespace cairn::test
