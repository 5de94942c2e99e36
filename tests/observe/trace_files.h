// Reads a run's traces: Perfetto's with Perfetto's own definitions (build/readers, which
// scripts/install_dependencies fetches).
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "observe/run_files.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {

inline bool perfetto_is_here() {
  return std::filesystem::exists(test_folder() + "/../build/readers/perfetto");
}

/// {"processes", "slices", "counters"}; null where it cannot be read.
inline nlohmann::json perfetto_trace_of(const std::filesystem::path& run) {
  const ShellResult result =
      shell("PYTHONPATH=" + test_folder() + "/../build/readers python3 -B " + test_folder() +
            "/observe/trace_reader.py " + (run / "trace.perfetto-trace").string());
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? nlohmann::json::parse(result.out) : nlohmann::json();
}

/// Of each rank's trace.json what HolisticTraceAnalysis has: {"0": [[name, category, step], ...]}.
inline bool hta_is_here() {
  return std::filesystem::exists(test_folder() + "/../build/readers/hta");
}
inline nlohmann::json hta_reading(const std::string& files) {
  const ShellResult result = shell("PYTHONPATH=" + test_folder() + "/../build/readers python3 -B " +
                                   test_folder() + "/observe/trace_hta.py " + files);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? nlohmann::json::parse(result.out) : nlohmann::json();
}

inline nlohmann::json chrome_trace_of(const std::filesystem::path& run) {
  return nlohmann::json::parse(text_of(run / "trace.json"));
}

/// Chrome's events of a phase, in the order of the file.
inline std::vector<nlohmann::json> events_of(const nlohmann::json& trace,
                                             const std::string& phase) {
  std::vector<nlohmann::json> found;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == phase) found.push_back(event);
  }
  return found;
}

}  // namespace cairn::test
