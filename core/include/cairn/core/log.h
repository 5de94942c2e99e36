// Logging to standard error with time, level and, in a job of several processes, the rank:
// "[12:00:01 rank 1 warn] text". CAIRN_LOG sets the level: debug, info (default), warn (default of
// ranks other than 0), error or off. Each {} takes one argument: log::info("{} steps", n).
#pragma once

#include <string>
#include <string_view>

#include "cairn/core/error.h"

namespace cairn::log {

enum class Level { debug, info, warn, error, off };
void set_level(Level level);
void write(Level level, std::string_view message);

namespace detail {
template <class... Args>
std::string format(std::string_view pattern, const Args&... args) {
  std::string out;
  std::size_t from = 0;
  [[maybe_unused]] auto put = [&](const std::string& value) {
    const std::size_t brace = pattern.find("{}", from);
    if (brace == std::string_view::npos) return;
    out += pattern.substr(from, brace - from);
    out += value;
    from = brace + 2;
  };
  (put(core::str(args)), ...);
  out += pattern.substr(from);
  return out;
}
}  // namespace detail

template <class... Args>
void debug(std::string_view pattern, const Args&... args) {
  write(Level::debug, detail::format(pattern, args...));
}
template <class... Args>
void info(std::string_view pattern, const Args&... args) {
  write(Level::info, detail::format(pattern, args...));
}
template <class... Args>
void warn(std::string_view pattern, const Args&... args) {
  write(Level::warn, detail::format(pattern, args...));
}
template <class... Args>
void error(std::string_view pattern, const Args&... args) {
  write(Level::error, detail::format(pattern, args...));
}

}  // namespace cairn::log
