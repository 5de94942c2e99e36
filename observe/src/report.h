// report.html: the page, with the run so far in it; and the page that compares several.
#pragma once

#include <string>

#include "history.h"
#include "open_metrics.h"

namespace cairn::observe {

std::string report(const History& history, const RunFacts& facts);
/// `runs`: a JSON array of what such pages hold.
std::string comparison_page(const std::string& runs);

}  // namespace cairn::observe
