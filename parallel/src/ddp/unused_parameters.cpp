#include "ddp/unused_parameters.h"

#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "ddp/held_losses.h"

namespace cairn::parallel {

bool UnusedParameters::agree(const ReachedParameters& own, const std::string& losses, bool shadows,
                             bool f32_slots, const ProcessGroup& group, const std::string& name) {
  if (static_graph_ && first_.empty() && !shadows) first_ = own.by_loss;
  if (static_graph_ && known_) return f32_slots;
  const std::size_t count = own.in_window.size();
  core::Packer message;
  message.text(losses).number(f32_slots ? 1 : 0);
  message.bits(shadows ? std::vector<bool>(count, false) : own.in_window);
  somewhere_.assign(count, false);
  std::vector<std::string> losses_of_rank;
  for (const std::string& bytes : group.exchange(message.bytes(), name)) {
    core::Unpacker told(bytes);
    losses_of_rank.push_back(told.text());
    f32_slots = told.number() != 0 || f32_slots;
    const std::vector<bool> reached = told.bits();
    CAIRN_CHECK(reached.size() == count, "ddp", "expected the same model on every rank, got ",
                count, " parameters here and ", reached.size(), " elsewhere");
    for (std::size_t i = 0; i < count; ++i) somewhere_[i] = somewhere_[i] || reached[i];
  }
  check_same_losses(losses_of_rank);
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
