#include "environment.h"

#include <charconv>
#include <cstdlib>
#include <limits>

#include "cairn/core/error.h"

namespace cairn::core {

namespace {

int shift_of_suffix(char suffix) {
  switch (suffix) {
    case 'k':
    case 'K':
      return 10;
    case 'm':
    case 'M':
      return 20;
    case 'g':
    case 'G':
      return 30;
    case 't':
    case 'T':
      return 40;
    default:
      return 0;
  }
}

}  // namespace

std::int64_t environment_integer(const char* variable, std::int64_t fallback, std::int64_t low,
                                 std::int64_t high) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return fallback;
  const std::string_view digits = text;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = error == std::errc{} && end == digits.data() + digits.size();
  CAIRN_CHECK(whole && value >= low && value <= high, variable, "expected an integer from ", low,
              " to ", high, ", got \"", text, "\"");
  return value;
}

std::size_t parse_bytes(std::string_view text, std::string_view where) {
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) shift = shift_of_suffix(digits.back());
  if (shift > 0) digits.remove_suffix(1);
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = error == std::errc{} && end == digits.data() + digits.size();
  const bool fits = value <= (std::numeric_limits<std::size_t>::max() >> shift);
  CAIRN_CHECK(whole && fits, where, "expected bytes such as 536870912, 512M or 2G, got \"", text,
              "\"");
  return value << shift;
}

}  // namespace cairn::core
