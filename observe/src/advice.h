// What would make a run faster, from what it told.
#pragma once

#include <string>
#include <vector>

#include "history.h"
#include "open_metrics.h"

namespace cairn::observe {

/// At most three sentences, the one that saves most first.
std::vector<std::string> advice(const History& history, const RunFacts& facts);

}  // namespace cairn::observe
