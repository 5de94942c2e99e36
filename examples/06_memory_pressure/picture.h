// A picture of the fullest device's peak memory against step time.
#pragma once

#include <string>
#include <vector>

#include "outcome.h"

namespace memory_pressure {

struct Panel {
  std::string title;
  std::vector<Outcome> outcomes;  // those without a step time are left out
  std::size_t budget = 0;         // a line
};

/// One panel below the other, written as SVG. Throws core::IoError.
void save_picture(const std::string& path, const std::vector<Panel>& panels);

}  // namespace memory_pressure
