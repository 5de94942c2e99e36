#include "child.h"

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cairn/core/error.h"

namespace memory_pressure {

using namespace cairn;

std::string to_json(const Outcome& outcome) {
  return nlohmann::json{{"name", outcome.name},       {"refusal", outcome.refusal},
                        {"losses", outcome.losses},   {"seconds", outcome.seconds},
                        {"device", outcome.device},   {"tensors", outcome.tensors},
                        {"program", outcome.program}, {"process", outcome.process}}
      .dump();
}

namespace {

Outcome from_json(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  Outcome outcome;
  json.at("name").get_to(outcome.name);
  json.at("refusal").get_to(outcome.refusal);
  json.at("losses").get_to(outcome.losses);
  json.at("seconds").get_to(outcome.seconds);
  json.at("device").get_to(outcome.device);
  json.at("tensors").get_to(outcome.tensors);
  json.at("program").get_to(outcome.program);
  json.at("process").get_to(outcome.process);
  return outcome;
}

}  // namespace

Outcome run_child(const std::vector<std::string>& arguments) {
  std::string command =
      core::str("'", std::filesystem::read_symlink("/proc/self/exe").string(), "'");
  for (const std::string& argument : arguments) command += core::str(" '", argument, "'");
  std::FILE* pipe = popen(command.c_str(), "r");
  CAIRN_CHECK(pipe != nullptr, "memory_pressure", "expected to start a process, got none");
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;) {
    text.append(part.data(), n);
  }
  const int status = pclose(pipe);
  if (status != 0) {
    core::fail<core::Error>("memory_pressure", "expected an outcome from ", command, ", got ",
                            WIFSIGNALED(status) ? core::str("signal ", WTERMSIG(status))
                                                : core::str("status ", WEXITSTATUS(status)));
  }
  return from_json(text);
}

}  // namespace memory_pressure
