// Runs before main: CAIRN_TEST_INSTRUCTION_SET=avx2 or =baseline keeps the vector loops from using
// more than that, so that what other machines would run is checked on this one.
#include <hwy/targets.h>

#include <cstdlib>
#include <string>

namespace {
const bool kLimited = [] {
  const char* text = std::getenv("CAIRN_TEST_INSTRUCTION_SET");
  const std::string limit = text == nullptr ? "" : text;
  const std::int64_t baseline = HWY_SCALAR | HWY_EMU128 | HWY_NEON;
  if (limit == "avx2") hwy::DisableTargets(~(baseline | HWY_AVX2));
  if (limit == "baseline") hwy::DisableTargets(~baseline);
  return !limit.empty();
}();
}  // namespace
