// States that do not fit exactly: entries under other names, missing and surplus ones.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::checkpointing {

/// The entry's other name: of the pairs {old, new} the first counts that is the name or a
/// dictionary around it.
std::string new_name(const std::string& name,
                     const std::vector<std::pair<std::string, std::string>>& names);
/// The state with its entries under other names. Throws core::DataError where two come to one name.
StateDict renamed(const StateDict& state,
                  const std::vector<std::pair<std::string, std::string>>& names);

/// `now`, with what `loaded` has of its entries. Adds the names, after `prefix`, of those that
/// loaded lacks to kept, and of those that now lacks to ignored.
StateDict merged(const StateDict& now, const StateDict& loaded, const std::string& prefix,
                 std::vector<std::string>& kept, std::vector<std::string>& ignored);

/// Whether both are states of optimizers, and of different ones: neither can use any of the
/// other's.
bool of_different_optimizers(const StateDict& a, const StateDict& b);

}  // namespace cairn::checkpointing
