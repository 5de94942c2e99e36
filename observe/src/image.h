// Pictures that a run shows: PNG files in memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cairn/core/tensor.h"

namespace cairn::observe {

inline constexpr std::int64_t kMostPixels = 2048;  // of a side, of all pictures together

struct ImageRecord {
  std::int64_t step = 0;
  double time = 0;  // seconds since 1970
  std::string name;
  int height = 0, width = 0, channels = 0;  // 1 or 3
  std::string png;
};

/// Run::image: of what shapes and dtypes, and what it throws.
ImageRecord image_record(std::string_view name, const Tensor& pixels);

std::string base64(std::string_view bytes);

}  // namespace cairn::observe
