#include "cairn/optim/partition.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"

namespace cairn::optim {

void add_reducer(Reducers& reducers, std::shared_ptr<core::GradientReducer> one) {
  const bool is_new = one && std::find(reducers.begin(), reducers.end(), one) == reducers.end();
  if (is_new) reducers.push_back(std::move(one));
}

Partition::Partition(const std::vector<ParameterGroup>& groups) {
  for (const ParameterGroup& group : groups) {
    for (const auto& [name, tensor] : group.parameters) {
      Entry& entry = entries_.emplace_back();
      entry.weight = tensor;
      const core::GradientSlot* slot = tensor.gradient_slot_or_null();
      auto reducer = slot == nullptr ? nullptr : slot->reducer();
      if (reducer == nullptr || reducer->own_part().world_size == 1) continue;
      if (!tensor.is_contiguous()) {
        core::fail<core::Unsupported>("sharding", "expected row-major parameters, got '", name,
                                      "' with shape ", tensor.shape(), " and strides ",
                                      tensor.strides());
      }
      entry.ranks = reducer->own_part();
      entry.reducer = reducer;
      cuts_any_ = true;
    }
  }
}

OwnedRange Partition::own_part(std::size_t parameter) const {
  const Entry& entry = entries_[parameter];
  if (entry.ranks.world_size == 1) return {};
  return core::even_part(entry.weight.numel(), entry.ranks.rank, entry.ranks.world_size);
}

Reducers Partition::reducers() const {
  Reducers all;
  for (const Entry& entry : entries_) add_reducer(all, entry.reducer.lock());
  return all;
}

std::vector<std::size_t> Partition::cut_by(const core::GradientReducer& reducer) const {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].reducer.lock().get() == &reducer) places.push_back(i);
  }
  return places;
}

void Partition::gather(const std::vector<Tensor>& updated) const {
  for (const auto& reducer : reducers()) {
    std::vector<Tensor> weights;
    auto next = updated.begin();
    for (const Entry& entry : entries_) {
      if (next == updated.end() || next->id() != entry.weight.id()) continue;
      ++next;
      if (entry.reducer.lock() == reducer) weights.push_back(entry.weight);
    }
    reducer->gather_weights(weights);
  }
}

void Partition::update_failed(const char* why) const {
  for (const auto& reducer : reducers()) reducer->update_failed(why);
}

}  // namespace cairn::optim
