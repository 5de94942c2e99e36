#include "ddp/unused_parameters.h"

namespace cairn::parallel {

void UnusedParameters::agree(const ReachedGradients& own, bool shadows, const ProcessGroup& group) {
  if (static_graph_ && first_.empty() && !shadows) first_ = own.by_loss;
  if (static_graph_ && known_) return;
  std::string bits;
  for (const bool reached : own.in_window) bits += reached && !shadows ? '1' : '0';
  somewhere_.assign(own.in_window.size(), false);
  for (const std::string& rank : group.exchange(bits, "which parameters losses reach")) {
    for (std::size_t i = 0; i < somewhere_.size(); ++i)
      somewhere_[i] = somewhere_[i] || rank.at(i) == '1';
  }
  known_ = true;
}

std::optional<UnusedParameters::Change> UnusedParameters::changed_since_first(
    const ReachedGradients& own) const {
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
