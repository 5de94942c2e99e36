// report.html: the page, with the run so far in it.
#pragma once

#include <string>

#include "history.h"
#include "open_metrics.h"

namespace cairn::observe {

std::string report(const History& history, const RunFacts& facts);

}  // namespace cairn::observe
