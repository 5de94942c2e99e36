#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cairn/parallel/reducer.h"
#include "group.h"

namespace cairn::capi {

struct Reducer final : Ranks {
  Reducer(std::shared_ptr<Group> of, const parallel::ReducerOptions& options)
      : group(std::move(of)), reducer(group->group, options) {}
  World world() override { return reducer.world(); }

  std::shared_ptr<Group> group;
  parallel::Reducer reducer;
  std::vector<TensorView> parts;  // where those of a sharding one go
};

}  // namespace cairn::capi
