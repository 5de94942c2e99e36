#include "gpu/sim/settings.h"

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>

#include "gpu/sim/machine.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void refuse(const char* name, const char* expected) {
  report("set-up", std::string(name) + ": expected " + expected + ", got \"" +
                       std::string(variable(name)) + "\"");
}

/// The number that the text starts with, which loses it.
std::uint64_t take_number(std::string_view& text, const char* name, const char* expected) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) refuse(name, expected);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

std::uint64_t number(const char* name, std::uint64_t otherwise, std::uint64_t most) {
  std::string_view text = variable(name);
  if (text.empty()) return otherwise;
  const std::uint64_t value = take_number(text, name, "a number");
  if (!text.empty() || value > most) refuse(name, "a smaller number");
  return value;
}

std::size_t bytes_of(const char* name, std::size_t otherwise) {
  constexpr const char* kExpected = "bytes, with K, M or G behind the number";
  std::string_view text = variable(name);
  if (text.empty()) return otherwise;
  const std::uint64_t value = take_number(text, name, kExpected);
  const std::size_t unit = std::string_view("KMG").find(text.empty() ? 'x' : text[0]);
  if (text.size() > 1 || (text.size() == 1 && unit > 2)) refuse(name, kExpected);
  return text.empty() ? value : value << (10 * (unit + 1));
}

Schedule schedule() {
  const std::string_view text = variable("CAIRN_SIM_SCHEDULE");
  if (text.empty() || text == "late") return Schedule::late;
  if (text == "early") return Schedule::early;
  if (text == "shuffled") return Schedule::shuffled;
  refuse("CAIRN_SIM_SCHEDULE", "late, early or shuffled");
}

std::vector<Fault> injected() {
  constexpr const char* kName = "CAIRN_SIM_FAULTS";
  constexpr const char* kExpected = "call@n=code or call@n+=code, with commas between";
  std::vector<Fault> faults;
  for (std::string_view text = variable(kName); !text.empty();) {
    const std::size_t at = text.find('@');
    if (at == std::string_view::npos) refuse(kName, kExpected);
    Fault fault{std::string(text.substr(0, at)), 0, false, 0};
    text.remove_prefix(at + 1);
    fault.first = take_number(text, kName, kExpected);
    fault.and_later = text.starts_with('+');
    if (fault.and_later) text.remove_prefix(1);
    if (!text.starts_with('=')) refuse(kName, kExpected);
    text.remove_prefix(1);
    fault.code = static_cast<int>(take_number(text, kName, kExpected));
    if (!text.empty() && text[0] != ',') refuse(kName, kExpected);
    if (!text.empty()) text.remove_prefix(1);
    faults.push_back(std::move(fault));
  }
  return faults;
}

}  // namespace

Settings settings_from_environment() {
  Settings settings;
  settings.gpus = static_cast<int>(number("CAIRN_SIM_GPUS", 1, kMostGpus));
  settings.memory = bytes_of("CAIRN_SIM_MEMORY", settings.memory);
  settings.shared = bytes_of("CAIRN_SIM_SHARED", settings.shared);
  settings.capability = static_cast<int>(number("CAIRN_SIM_CAPABILITY", 90, 200));
  settings.peers = number("CAIRN_SIM_PEERS", 1, 1) != 0;
  settings.schedule = schedule();
  settings.seed = number("CAIRN_SIM_SEED", 1, UINT64_MAX);
  settings.faults = injected();
  return settings;
}

}  // namespace cairn::gpusim
