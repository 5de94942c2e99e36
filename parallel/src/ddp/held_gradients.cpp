#include "ddp/held_gradients.h"

#include <algorithm>
#include <set>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"

namespace cairn::parallel {
namespace {

using Slot = core::GradientSlot;

/// What lies in the slots themselves, or in the sums beside them.
struct Held {
  bool any = false;
  std::set<const core::Contribution*> losses;
  std::string plain = "losses of before";  // where no contribution is known

  std::string describe() const {
    std::set<std::string> names;  // a rank may know a loss twice (given to other optimizers)
    for (const core::Contribution* loss : losses) names.insert(loss->describe());
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : " and ") + name;
    return text.empty() ? plain : text;
  }
};

struct HeldByModel {
  Held gradients, sums;

  bool knows_losses() const { return !gradients.losses.empty() || !sums.losses.empty(); }
  std::string describe() const {
    std::string text = gradients.any ? gradients.describe() : "";
    if (sums.any) text += (text.empty() ? "sums of " : ", sums of ") + sums.describe();
    return text.empty() ? "none" : text;
  }
};

void add_gradient(const Slot& slot, Held& held) {
  if (!slot.holds_gradient() && slot.state() != Slot::State::writing) return;
  const core::GradientScale& scale = slot.scale();
  held.any = true;
  if (scale.contribution) held.losses.insert(scale.contribution.get());
  held.plain = scale.scaler == 0 ? "a loss that nobody scaled"
                                 : core::str("a loss scaled by ", scale.factor);
}

void add_sum(const Slot& slot, Held& held) {
  if (!slot.has_sum()) return;
  held.any = true;
  for (const auto& one : slot.sum_contributions()) {
    if (!one->over) held.losses.insert(one.get());
  }
}

HeldByModel held_by(const NamedTensors& parameters) {
  HeldByModel held;
  for (const auto& [name, tensor] : parameters) {
    const Slot* slot = tensor.gradient_slot_or_null();
    if (slot == nullptr || !tensor.requires_grad()) continue;
    add_gradient(*slot, held.gradients);
    add_sum(*slot, held.sums);
  }
  return held;
}

}  // namespace

bool holds_reduced_of_before(const NamedTensors& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const NamedTensor& parameter) {
    const Slot* slot = parameter.tensor.gradient_slot_or_null();
    return slot != nullptr &&
           (slot->adds_to_reduced() || slot->has_sum() || slot->state() == Slot::State::reduced);
  });
}

std::string describe_held_losses(const NamedTensors& parameters) {
  return held_by(parameters).describe();
}

std::string known_losses(const NamedTensors& parameters) {
  const HeldByModel held = held_by(parameters);
  return held.knows_losses() ? held.describe() : "";
}

std::string HeldGradients::pack() const {
  return core::Packer().text(losses).number(f32_slots ? 1 : 0).bits(bits).bytes();
}

std::vector<HeldGradients> unpack(const std::vector<std::string>& of_rank) {
  std::vector<HeldGradients> ranks;
  for (const std::string& bytes : of_rank) {
    core::Unpacker message(bytes);
    HeldGradients& rank = ranks.emplace_back();
    rank.losses = message.text();
    rank.f32_slots = message.number() != 0;
    rank.bits = message.bits();
    CAIRN_CHECK(rank.losses == ranks[0].losses, "ddp",
                "expected the same losses on every rank since the last step, got ", ranks[0].losses,
                " on rank 0 and ", rank.losses, " on rank ", ranks.size() - 1,
                " (a backward that one rank left out, lost or ran in another order? clear_grad() ",
                "on all begins anew)");
    CAIRN_CHECK(rank.bits.size() == ranks[0].bits.size(), "ddp",
                "expected the same model on every rank, got ", ranks[0].bits.size(),
                " bits of gradients on rank 0 and ", rank.bits.size(), " on rank ",
                ranks.size() - 1);
  }
  return ranks;
}

bool any_has_f32_slots(const std::vector<HeldGradients>& ranks) {
  return std::any_of(ranks.begin(), ranks.end(),
                     [](const HeldGradients& rank) { return rank.f32_slots; });
}

}  // namespace cairn::parallel
