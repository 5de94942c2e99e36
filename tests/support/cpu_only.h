// For tests that run on the default device, but say something that holds on the CPU alone.
#pragma once

#include <gtest/gtest.h>

#include "cairn/core/device.h"

#define CAIRN_CPU_ONLY(why) \
  if (!::cairn::core::default_device().is_cpu()) GTEST_SKIP() << (why)
