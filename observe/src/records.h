// What was told, as the writer hands it to the files. Names and texts are valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/observe/run.h"

namespace cairn::observe {

using NamedValues = std::vector<std::pair<std::string, double>>;

/// Names that the run has itself begin so.
inline constexpr std::string_view kSeconds = "seconds/", kMemory = "memory/";
inline constexpr std::string_view kMemoryPeak = "memory/peak", kStepSeconds = "seconds/step",
                                  kWaitSeconds = "seconds/wait";

struct StepRecord {
  std::int64_t step = 0;
  double time = 0;  // seconds since 1970
  NamedValues values;
};

struct EventRecord {
  std::int64_t step = 0;
  double time = 0;
  EventKind kind = EventKind::note;
  std::string text, culprit;
};

struct TextRecord {
  std::int64_t step = 0;
  double time = 0;
  std::string name, text;
};

/// Bytes that are no UTF-8 are replaced by U+FFFD.
std::string valid_utf8(std::string_view text);

}  // namespace cairn::observe
