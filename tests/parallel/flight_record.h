// Flight records of a job that broke: our verdict and torchfrtrace's, in the same terms.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {

inline std::string record_verdict(const std::filesystem::path& folder) {
  return read_text(folder / "verdict.txt");
}

/// What torch_flight_recorder.py says of it.
inline nlohmann::json read_record(const std::string& folder) {
  const ShellResult result =
      shell("python3 -B " + test_folder() + "/parallel/torch_flight_recorder.py " + folder);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? nlohmann::json::parse(result.out) : nlohmann::json::object();
}

// A verdict: ["size", the collective's number, [ranks]]: missing, type, size or dtype.

/// Ours. Where it names no collective: `sequence`. Of ranks that differ, the second side.
inline nlohmann::json own_verdict(const std::string& folder, std::uint64_t sequence) {
  const std::string verdict = record_verdict(folder);
  const auto one = [](const std::string& rank) { return nlohmann::json::array({std::stoi(rank)}); };
  std::smatch found;
  const auto says = [&](const char* pattern) {
    return std::regex_search(verdict, found, std::regex(pattern));
  };
  if (says("^rank (\\d+) did not come to collective (\\d+),"))
    return {"missing", std::stoi(found[2]), one(found[1])};
  if (says("^rank (\\d+) left the group after (\\d+) "))
    return {"missing", std::stoi(found[2]), one(found[1])};
  if (says("^rank (\\d+) died")) return {"missing", sequence, one(found[1])};
  if (says("^rank (\\d+) .*(threw|gave up): ") || says("^rank (\\d+) gave up: "))
    return {"missing", sequence, one(found[1])};
  if (!says("^ranks disagree on collective (\\d+): ranks? ([\\d, ]+) calls? (\\w+)( \\w+)* (\\w+)"
            "\\[(\\d+)\\].*; ranks? ([\\d, ]+) calls? (\\w+)( \\w+)* (\\w+)\\[(\\d+)\\]"))
    return verdict;
  const char* kind = found[3] != found[8]    ? "type"
                     : found[6] != found[11] ? "size"
                     : found[5] != found[10] ? "dtype"
                                             : "name";
  return {kind, std::stoi(found[1]), nlohmann::json::parse("[" + std::string(found[7]) + "]")};
}

/// torchfrtrace's first trouble. Where it finds none, it names the ranks that left no record.
inline nlohmann::json torch_verdict(const nlohmann::json& torch, std::uint64_t sequence) {
  if (!torch["trouble"].empty()) return torch["trouble"][0];
  return {"missing", sequence, torch["without_dump"]};
}

/// Whether it is this one. Where ranks differ, one of them is taken to be right, and those that
/// differ from it are named: the victim, or all others of its group.
inline bool is_verdict(const nlohmann::json& verdict, const std::string& kind,
                       std::uint64_t sequence, int victim, const std::vector<int>& others) {
  if (!verdict.is_array() || verdict.size() != 3) return false;
  if (verdict[0] != kind || verdict[1] != sequence) return false;
  const bool differ = kind == "type" || kind == "size" || kind == "dtype";
  return verdict[2] == nlohmann::json::array({victim}) ||
         (differ && verdict[2] == nlohmann::json(others));
}

}  // namespace cairn::test
