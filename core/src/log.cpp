#include "cairn/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

namespace cairn::log {

namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::debug:
      return spdlog::level::debug;
    case Level::info:
      return spdlog::level::info;
    case Level::warn:
      return spdlog::level::warn;
    case Level::error:
      return spdlog::level::err;
    case Level::off:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

// As in the API and in CAIRN_LOG: spdlog calls one of them "warning".
const char* name_of(Level level) {
  constexpr const char* kNames[] = {"debug", "info", "warn", "error", "off"};
  return kNames[static_cast<int>(level)];
}

// Where every rank would say the same, only rank 0 says it: the others speak from warnings on.
Level default_level() {
  const char* rank = std::getenv("RANK");
  return rank == nullptr || std::string_view(rank) == "0" ? Level::info : Level::warn;
}

Level level_from_environment() {
  const char* text = std::getenv("CAIRN_LOG");
  const std::string_view name = text == nullptr ? "" : text;
  if (name == "debug") return Level::debug;
  if (name == "info") return Level::info;
  if (name == "warn") return Level::warn;
  if (name == "error") return Level::error;
  if (name == "off") return Level::off;
  return default_level();
}

std::string rank_prefix() {
  const char* rank = std::getenv("RANK");
  const char* world_size = std::getenv("WORLD_SIZE");
  if (rank == nullptr || world_size == nullptr || std::string_view(world_size) == "1") return "";
  std::string prefix = "rank ";
  for (const char* c = rank; *c != '\0'; ++c) prefix += *c == '%' ? '_' : *c;
  return prefix + " ";
}

// Never destroyed: destructors of static objects may still log.
spdlog::logger& logger() {
  static auto* const instance = [] {
    auto* made = new spdlog::logger("cairn", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("[%H:%M:%S " + rank_prefix() + "%v");
    made->set_level(to_spdlog(level_from_environment()));
    made->flush_on(spdlog::level::debug);
    return made;
  }();
  return *instance;
}

}  // namespace

void set_level(Level level) {
  logger().set_level(to_spdlog(level));
}

void write(Level level, std::string_view message) {
  if (level == Level::off) return;
  if (!logger().should_log(to_spdlog(level))) return;
  const std::string text = core::str(name_of(level), "] ", message);
  logger().log(to_spdlog(level), spdlog::string_view_t(text));
}

}  // namespace cairn::log
