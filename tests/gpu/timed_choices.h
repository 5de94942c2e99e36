// While it lives vendors' algorithms are chosen as users have it, and kept in memory alone.
#pragma once

#include <cstdlib>

#include "cairn/kernels/product_choices.h"

namespace cairn::test {

class [[nodiscard]] TimedChoices {
 public:
  TimedChoices() {
    setenv("CAIRN_CACHE", "off", 1);
    unsetenv("CAIRN_PRODUCTS");  // which would stand before saved choices
    kernels::set_product_routes("time");
  }
  ~TimedChoices() {
    kernels::set_product_routes("default");
    setenv("CAIRN_PRODUCTS", "default", 1);
  }
  TimedChoices(const TimedChoices&) = delete;
  TimedChoices& operator=(const TimedChoices&) = delete;
};

}  // namespace cairn::test
