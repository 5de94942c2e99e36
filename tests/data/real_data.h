// Real data beside the project: used where it is there.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace cairn::data::testing {

inline constexpr const char* kNoRealData =
    "no real data found: set CAIRN_TEST_DATA to the folder that holds mnist/ to run this test";

/// The folder of one data set below CAIRN_TEST_DATA (default: ../shared/data beside the sources),
/// or "" where it is not there.
inline std::string real_data(const std::string& name) {
  const char* set = std::getenv("CAIRN_TEST_DATA");
  const std::filesystem::path folder =
      std::filesystem::path(set != nullptr ? set : CAIRN_TEST_DATA_DEFAULT) / name;
  return std::filesystem::is_directory(folder) ? folder.string() : "";
}

}  // namespace cairn::data::testing
