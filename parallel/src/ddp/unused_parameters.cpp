#include "ddp/unused_parameters.h"

namespace cairn::parallel {

bool UnusedParameters::agree(const ReachedParameters& own, HeldGradients held, bool shadows,
                             const ProcessGroup& group, const std::string& name) {
  if (static_graph_ && first_.empty() && !shadows) first_ = own.by_loss;
  if (static_graph_ && known_) return held.f32_slots;
  const std::size_t count = own.in_window.size();
  held.bits = shadows ? std::vector<bool>(count, false) : own.in_window;
  const std::vector<HeldGradients> ranks = unpack(group.exchange(held.pack(), name));
  somewhere_.assign(count, false);
  for (const HeldGradients& rank : ranks) {
    for (std::size_t i = 0; i < count; ++i) somewhere_[i] = somewhere_[i] || rank.bits[i];
  }
  known_ = true;
  return any_has_f32_slots(ranks);
}

std::optional<UnusedParameters::Change> UnusedParameters::changed_since_first(
    const ReachedParameters& own) const {
  if (!static_graph_) return std::nullopt;
  for (std::size_t i = 0; i < own.by_loss.size(); ++i) {
    const bool now = own.by_loss[i];
    if (now != first_.at(i) || (now && !somewhere_[i])) return Change{i, now};
  }
  return std::nullopt;
}

void UnusedParameters::forget() {
  known_ = false;
  first_.clear();
}

}  // namespace cairn::parallel
