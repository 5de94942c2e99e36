// What each rank found in its parts of tensors, made known to all.
#pragma once

#include <string_view>
#include <vector>

#include "cairn/optim/partition.h"
#include "cairn/optim/report.h"

namespace cairn::optim {

struct FoundInParts {
  FoundChecks::OfParameters& found;
  std::vector<bool> divided;  // by parameter: ranks have found other pieces of it
};

/// What was found of every parameter that is divided becomes that of all ranks, in the order of its
/// elements. A collective of those that cut any: each hands in the same lists.
void exchange_parts(const Partition& partition, const std::vector<FoundInParts>& lists,
                    std::string_view what);

}  // namespace cairn::optim
