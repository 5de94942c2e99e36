#pragma once

#include <string>

namespace cairn::core {

/// The message of the E that f throws; "nothing thrown" where it does not.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing thrown";
}

}  // namespace cairn::core
