// World: how one rank of a job reaches the others, for code that must not know of process groups
// (state files, for one). `parallel::ProcessGroup::world()` makes one; the default is a world of
// one rank.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::core {

struct World {
  using Exchange =
      std::function<std::vector<std::string>(const std::string& value, std::string_view name)>;

  int rank = 0;
  int size = 1;
  Exchange exchange_function;  // unset in a world of one

  /// Hands a small value (bytes) to every rank: all ranks' values in rank order. A collective:
  /// every rank calls it, in the same order; `name` says what for in errors. Throws
  /// CommunicationError where a rank is dead, missing or elsewhere.
  std::vector<std::string> exchange(const std::string& value, std::string_view name) const {
    return exchange_function ? exchange_function(value, name) : std::vector<std::string>{value};
  }
  /// Returns when every rank has come.
  void barrier(std::string_view name) const { exchange("", name); }
};

}  // namespace cairn::core

namespace cairn {
using core::World;
}
