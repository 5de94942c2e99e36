#include "cairn/kernels/tf32.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "cairn/core/error.h"

namespace cairn::kernels {

namespace {

bool from_environment() {
  const char* const variable = std::getenv("CAIRN_TF32");
  const std::string value = variable == nullptr ? "0" : variable;
  CAIRN_CHECK(value == "0" || value == "1", "CAIRN_TF32", "expected 0 or 1, got '", value, "'");
  return value == "1";
}

std::atomic<bool>& setting() {
  static std::atomic<bool> allowed = from_environment();
  return allowed;
}

}  // namespace

bool tf32_allowed() {
  return setting();
}

void allow_tf32(bool allowed) {
  setting() = allowed;
}

}  // namespace cairn::kernels
