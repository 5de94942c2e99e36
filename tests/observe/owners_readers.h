// What TensorBoard and Prometheus' client read in a run's folder. Python's packages lie in
// build/readers (scripts/install_dependencies fetches them).
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {

inline bool readers_are_here() {
  return std::filesystem::exists(test_folder() + "/../build/readers/tensorboard");
}

/// {"tensorboard": {"scalars", "texts", "histograms"}, "openmetrics"}; null: it cannot be read.
inline nlohmann::json read_by_owners(const std::string& folder) {
  const std::string readers = test_folder() + "/../build/readers";
  const ShellResult result = shell("PYTHONPATH=" + readers + " python3 -B " + test_folder() +
                                   "/observe/owners_readers.py " + folder);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? nlohmann::json::parse(result.out) : nlohmann::json();
}

}  // namespace cairn::test
