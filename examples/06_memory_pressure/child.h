// Outcomes travel as JSON from a process that measures one way to the one that shows them all.
#pragma once

#include <string>
#include <vector>

#include "outcome.h"

namespace memory_pressure {

std::string to_json(const Outcome& outcome);

/// Runs this program with these arguments and reads the outcome that it prints. Throws core::Error
/// where it ends otherwise.
Outcome run_child(const std::vector<std::string>& arguments);

}  // namespace memory_pressure
