// Settings from environment variables, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cairn::core {

/// The variable's integer, or fallback where it is unset or empty. Throws InvalidArgument naming it
/// outside [low, high].
std::int64_t environment_integer(const char* variable, std::int64_t fallback, std::int64_t low,
                                 std::int64_t high);

/// "512M" -> bytes; suffixes K, M, G, T (powers of 1024, either case). Throws
/// InvalidArgument("[where] ...").
std::size_t parse_bytes(std::string_view text, std::string_view where);

}  // namespace cairn::core
