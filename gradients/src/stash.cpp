#include "cairn/gradients/stash.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/gradients/arena.h"
#include "cairn/kernels/empty_with_layout_of.h"

namespace cairn::gradients {

namespace {

using ContributionPtr = std::shared_ptr<core::Contribution>;

/// Tensors that one pass moves.
struct Pass {
  Device device;
  core::GradientScale scale;
  bool adds = false;  // to sums that are there
  std::vector<TensorView> gradients, sums;
  std::vector<std::size_t> tensors;
};

Pass& pass_for(std::vector<Pass>& passes, Device device, const core::GradientSlot& slot) {
  const auto found = std::find_if(passes.begin(), passes.end(), [&](const Pass& pass) {
    return pass.device == device && pass.adds == slot.has_sum() &&
           pass.scale.factor == slot.scale().factor &&
           pass.scale.contribution == slot.scale().contribution;
  });
  if (found != passes.end()) return *found;
  return passes.emplace_back(Pass{device, slot.scale(), slot.has_sum(), {}, {}, {}});
}

bool holds_gradient(const Tensor& tensor) {
  const core::GradientSlot* slot = tensor.gradient_slot_or_null();
  return slot != nullptr && tensor.requires_grad() && slot->holds_gradient();
}

kernels::PendingCheck move(const Pass& pass, double scale) {
  const double factor = scale / pass.scale.factor;
  if (!pass.adds) return kernels::multi_tensor_scale(pass.gradients, pass.sums, factor);
  return kernels::multi_tensor_axpby(factor, pass.gradients, 1.0, pass.sums, pass.sums,
                                     kernels::CheckedArgument::x);
}

/// The device may have added some of them: a second try would add these again.
void break_slots(const Pass& pass, const std::vector<Tensor>& tensors, const char* why) {
  for (const std::size_t i : pass.tensors) tensors[i].gradient_slot().mark_broken(why);
}

void tell(const Pass& pass, const std::vector<Tensor>& tensors,
          const kernels::PendingCheck& found) {
  auto* contribution = dynamic_cast<CheckedContribution*>(pass.scale.contribution.get());
  if (contribution == nullptr) return;
  Check& check = contribution->checks.emplace_back();
  check.found = found;
  for (const std::size_t i : pass.tensors) {
    check.tensors.push_back({tensors[i].id(), tensors[i].gradient_slot().clears()});
  }
}

/// The leaves, and what shares an arena with one of them.
std::vector<Tensor> with_their_arenas(const std::vector<Tensor>& leaves) {
  std::vector<Tensor> all;
  std::unordered_set<const GradientArena*> arenas;
  for (const Tensor& leaf : leaves) {
    const auto arena = GradientArena::of(leaf);
    if (!arena) {
      all.push_back(leaf);
    } else if (arenas.insert(arena.get()).second) {
      for (const NamedTensor& parameter : arena->parameters()) all.push_back(parameter.tensor);
    }
  }
  return all;
}

}  // namespace

std::vector<StashPass> stash(const std::vector<Tensor>& tensors, double scale) {
  std::vector<Tensor> temporaries;
  std::vector<Pass> passes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    if (!holds_gradient(tensor)) continue;
    core::GradientSlot& slot = tensor.gradient_slot();
    // A weight that lies in parts has a layout and no elements to ask for.
    const bool alike = slot.holds_part() || slot.memory().strides() == tensor.strides();
    const Tensor& like = alike ? slot.memory() : tensor;
    const bool fits = slot.sum().defined() && slot.sum().shape() == like.shape();
    CAIRN_CHECK(fits || !slot.has_sum(), "stash",
                "expected no_sync ahead of the first backward that reduces where ranks divide ",
                "gradients of several losses, got the whole gradient of '", tensor.name(),
                "' beside a sum of which this rank has a part");
    if (!fits && !slot.has_sum())
      slot.set_sum(
          kernels::empty_with_layout_of(like, DType::f32, core::MemoryCategory::gradients));
    Pass& pass = pass_for(passes, tensor.device(), slot);
    pass.gradients.push_back(kernels::laid_out_like(like, slot.memory(), temporaries));
    pass.sums.push_back(slot.sum());
    pass.tensors.push_back(i);
  }
  std::vector<StashPass> moved;
  for (const Pass& pass : passes) {
    try {
      moved.push_back({pass.tensors, move(pass, scale)});
    } catch (const core::DeviceError& error) {
      if (pass.adds) break_slots(pass, tensors, error.what());
      throw;
    }
    tell(pass, tensors, moved.back().check);
    for (const std::size_t i : pass.tensors) tensors[i].gradient_slot().mark_stashed();
  }
  return moved;
}

void begin_run(core::RunId run, const core::GradientScale& scale,
               const std::vector<Tensor>& leaves) {
  std::vector<Tensor> others;
  for (const Tensor& tensor : with_their_arenas(leaves)) {
    if (tensor.gradient_slot_or_null() == nullptr) continue;
    core::GradientSlot& slot = tensor.gradient_slot();
    // A backward within this one has begun: what this one has left, ranks may be reducing.
    if (slot.state() == core::GradientSlot::State::writing) continue;
    if (slot.must_stash_for(scale)) {
      others.push_back(tensor);
    } else if (slot.belongs_to_next(scale)) {
      slot.set_scale(scale);
    }
  }
  stash(others);
  // All memory is laid out anew, where it must be, before a slot may refuse. In the graph's order,
  // which ranks share.
  for (const Tensor& leaf : leaves) {
    if (const auto arena = GradientArena::of(leaf)) arena->begin(run);
  }
  for (const Tensor& leaf : leaves) leaf.gradient_slot().begin(run, scale, leaf.name());
}

}  // namespace cairn::gradients
