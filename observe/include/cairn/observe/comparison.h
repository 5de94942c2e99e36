// Several runs on one page: their curves over one another, their numbers and options side by side.
#pragma once

#include <span>
#include <string>

namespace cairn::observe {

/// The text of an HTML page without requests to anywhere. `folders` are those of observe::Runs, two
/// or more; of each its report.html is read, so that runs that go on, and those of ranks (rank-N),
/// compare too. Throws core::IoError where one has none, core::DataError where it is another.
std::string comparison(std::span<const std::string> folders);

}  // namespace cairn::observe
