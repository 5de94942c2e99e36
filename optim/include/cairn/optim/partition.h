// Which elements of its parameters a rank updates and keeps the moments and masters of, where a
// reducer divides them (parallel::ShardedDataParallel). Not for trainers.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "cairn/core/gradient_slot.h"
#include "cairn/core/sharding.h"
#include "cairn/core/tensor.h"

namespace cairn::optim {

struct ParameterGroup;

using OwnedRange = std::optional<core::ElementRange>;  // of a parameter; nothing: all of it

/// Each once, in the order of the parameters: the same on every rank.
using Reducers = std::vector<std::shared_ptr<core::GradientReducer>>;
void add_reducer(Reducers& reducers, std::shared_ptr<core::GradientReducer> one);  // null: nothing

class Partition {
 public:
  Partition() = default;
  /// Throws Unsupported for a parameter that is to be cut and is not row-major.
  explicit Partition(const std::vector<ParameterGroup>& groups);

  /// This rank's elements of a parameter (its place over all groups); nothing: it is not cut.
  OwnedRange own_part(std::size_t parameter) const;
  bool cuts_any() const { return cuts_any_; }

  /// Of the parameters that are cut.
  Reducers reducers() const;
  /// The parameters that one of those cuts, by their place over all groups.
  std::vector<std::size_t> cut_by(const core::GradientReducer& reducer) const;
  /// All ranks get each other's updates of these parameters, in their order. A collective.
  void gather(const std::vector<Tensor>& updated) const;
  /// This rank cannot take part in the others' gather().
  void update_failed(const char* why) const;

 private:
  struct Entry {
    Tensor weight;
    std::weak_ptr<core::GradientReducer> reducer;
    core::GradientReducer::OwnPart ranks;  // of 1: it is not cut
  };

  std::vector<Entry> entries_;
  bool cuts_any_ = false;
};

}  // namespace cairn::optim
