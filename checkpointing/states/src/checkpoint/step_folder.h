// Names inside a folder of checkpoints.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kStateFile = "state.safetensors";
inline constexpr const char* kStepPrefix = "step-";
inline constexpr const char* kRankPrefix = "rank-";

inline std::string step_folder(std::int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "%s%08lld", kStepPrefix, static_cast<long long>(step));
  return text;
}

/// The step of "step-00000500"; -1 for any other name.
inline std::int64_t step_of_folder(const std::string& name) {
  std::int64_t step = -1;
  const std::string prefix = kStepPrefix;
  if (name.rfind(prefix, 0) != 0) return -1;
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + prefix.size(), end, step);
  return parsed.ec == std::errc{} && parsed.ptr == end && step_folder(step) == name ? step : -1;
}

inline constexpr const char* kTemporary = ".tmp";  // being written, or being removed
inline constexpr const char* kReplaced = ".old";   // while a new one takes its name

inline std::string hidden_folder(std::int64_t step, const std::string& suffix) {
  return core::str(".", step_folder(step), suffix);
}

/// The step of ".step-00000500" + suffix; -1 for any other name.
inline std::int64_t step_of_hidden(const std::string& name, const std::string& suffix) {
  if (name.size() <= suffix.size() || name[0] != '.' || !name.ends_with(suffix)) return -1;
  return step_of_folder(name.substr(1, name.size() - 1 - suffix.size()));
}

inline std::string rank_name(int rank) {
  return core::str(kRankPrefix, rank);
}
inline std::string rank_file(int rank) {
  return rank_name(rank) + ".safetensors";
}

/// What entries of a file are called in the whole checkpoint: "" for the shared state, "rank-0."
/// for a rank's own.
inline std::string entry_prefix(const std::string& file) {
  if (file == kStateFile) return "";
  return file.substr(0, file.find('.')) + ".";
}

}  // namespace cairn::checkpointing
