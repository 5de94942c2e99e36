#pragma once

#include <string>

namespace cairn::amp {

/// Whole numbers in full ("16777216"), others as streams print them.
std::string number(double value);

}  // namespace cairn::amp
