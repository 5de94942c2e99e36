#include "ddp/held_losses.h"

#include <set>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

using Slot = core::GradientSlot;

/// What lies in the slots themselves, or in the sums beside them.
struct Held {
  bool any = false, local = false;
  std::set<std::string> losses;
  std::string plain = "losses of before";  // where no contribution is known

  std::string describe(bool tells_reduced) const {
    std::string text;
    for (const std::string& loss : losses) text += (text.empty() ? "" : " and ") + loss;
    if (text.empty()) text = plain;
    return tells_reduced ? text + (local ? " (not reduced)" : " (reduced)") : text;
  }
};

void add_gradient(const Slot& slot, Held& held) {
  if (!slot.holds_gradient() && slot.state() != Slot::State::writing) return;
  const core::GradientScale& scale = slot.scale();
  held.any = true;
  held.local = held.local || slot.state() == Slot::State::local;
  if (scale.contribution) held.losses.insert(scale.contribution->describe());
  held.plain = scale.scaler == 0 ? "a loss that nobody scaled"
                                 : core::str("a loss scaled by ", scale.factor);
}

void add_sum(const Slot& slot, Held& held) {
  if (!slot.has_sum()) return;
  held.any = true;
  held.local = held.local || slot.sum_is_local();
  for (const auto& one : slot.sum_contributions()) {
    if (!one->over) held.losses.insert(one->describe());
  }
}

}  // namespace

std::string describe_held_losses(const NamedTensors& parameters, bool tells_reduced) {
  Held gradients, sums;
  for (const auto& [name, tensor] : parameters) {
    const Slot* slot = tensor.gradient_slot_or_null();
    if (slot == nullptr || !tensor.requires_grad()) continue;
    add_gradient(*slot, gradients);
    add_sum(*slot, sums);
  }
  std::string text = gradients.any ? gradients.describe(tells_reduced) : "";
  if (sums.any) text += (text.empty() ? "sums of " : ", sums of ") + sums.describe(tells_reduced);
  return text.empty() ? "none" : text;
}

void check_same_losses(const std::vector<std::string>& of_rank) {
  for (std::size_t rank = 1; rank < of_rank.size(); ++rank) {
    CAIRN_CHECK(of_rank[rank] == of_rank[0], "ddp",
                "expected the same losses on every rank since the last step, got ", of_rank[0],
                " on rank 0 and ", of_rank[rank], " on rank ", rank,
                " (a backward that one rank left out, lost or ran in another order? clear_grad() ",
                "on all begins anew)");
  }
}

}  // namespace cairn::parallel
