#pragma once

#include <string>

#include "cairn/core/error.h"

namespace cairn::test {

/// The message of the E that f throws; "nothing thrown" where it does not.
template <class E = core::InvalidArgument, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing thrown";
}

}  // namespace cairn::test
