#pragma once

#include <utility>

#include "cairn/parallel/process_group.h"
#include "objects.h"

namespace cairn::capi {

struct Group final : Ranks {
  explicit Group(parallel::ProcessGroup processes) : group(std::move(processes)) {}
  World world() override { return group.world(); }

  parallel::ProcessGroup group;
};

inline std::shared_ptr<Group> group_of(const void* handle, const char* function) {
  return object_of<Group>(handle, function, "a group");
}

}  // namespace cairn::capi
