#include "ddp/unused_parameters.h"

#include "cairn/core/error.h"

namespace cairn::parallel {

bool UnusedParameters::agree(const ReachedParameters& own, bool shadows, bool f32_slots,
                             const ProcessGroup& group) {
  if (static_graph_ && first_.empty() && !shadows) first_ = own.by_loss;
  if (static_graph_ && known_) return f32_slots;
  std::string bits(1, f32_slots ? '1' : '0');
  for (const bool reached : own.in_window) bits += reached && !shadows ? '1' : '0';
  somewhere_.assign(own.in_window.size(), false);
  for (const std::string& rank : group.exchange(bits, "which parameters losses reach")) {
    CAIRN_CHECK(rank.size() == bits.size(), "ddp", "expected the same model on every rank, got ",
                own.in_window.size(), " parameters here and ", rank.size() - 1, " elsewhere");
    f32_slots = f32_slots || rank.at(0) == '1';
    for (std::size_t i = 0; i < somewhere_.size(); ++i)
      somewhere_[i] = somewhere_[i] || rank.at(i + 1) == '1';
  }
  known_ = true;
  return f32_slots;
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
