// A step reduces what no backward has reduced: gradients of no_sync, sums of losses with scales of
// their own. Where ranks divide gradients the backward that reduces does so with these sums.
#include <algorithm>
#include <set>
#include <string>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/sharding.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/parallel/flatten.h"
#include "ddp/ddp.h"
#include "reducer/names.h"

namespace cairn::parallel {
namespace {

using State = core::GradientSlot::State;

/// What a rank holds of one parameter: the first bits that it tells. Behind those of all
/// parameters come sums_of().
struct GradientOnRank {
  bool gradient = false, local_gradient = false;
  bool sum = false, local_sum = false;

  bool is_local() const { return local_gradient || local_sum; }
};
constexpr std::size_t kBits = 4;

GradientOnRank held_of(const core::GradientSlot& slot) {
  return {.gradient = slot.holds_gradient(),
          .local_gradient = slot.state() == State::local,
          .sum = slot.has_sum(),
          .local_sum = slot.sum_is_local()};
}

/// Also of parameters that were frozen since.
std::vector<bool> bits_of(const NamedTensors& parameters) {
  std::vector<bool> bits;
  for (const NamedTensor& one : parameters) {
    const GradientOnRank held = held_of(one.tensor.gradient_slot());
    bits.insert(bits.end(), {held.gradient, held.local_gradient, held.sum, held.local_sum});
  }
  return bits;
}

GradientOnRank held_on(const std::vector<bool>& rank, std::size_t parameter) {
  const std::size_t i = kBits * parameter;
  return {rank[i], rank[i + 1], rank[i + 2], rank[i + 3]};
}

bool is_broken(const Tensor& parameter) {
  return parameter.requires_grad() && parameter.gradient_slot().state() == State::broken;
}

bool has_anything_to_reduce(const NamedTensors& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const NamedTensor& parameter) {
    return held_of(parameter.tensor.gradient_slot()).is_local() || is_broken(parameter.tensor);
  });
}

void check_whole(const NamedTensors& parameters) {
  for (const auto& [name, tensor] : parameters) {
    if (is_broken(tensor)) tensor.gradient_slot().check_whole(name);
  }
}

std::string list_of_local(const std::vector<bool>& rank, const NamedTensors& parameters) {
  std::vector<std::string> names;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const GradientOnRank held = held_on(rank, p);
    if (held.local_gradient) names.push_back(parameters[p].name);
    if (held.sum) names.push_back(parameters[p].name + " (sum)");
  }
  return names.empty() ? "none" : join_names(names);
}

void check_same_parameters(const std::vector<HeldGradients>& ranks,
                           const NamedTensors& parameters) {
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::vector<bool>&first = ranks[0].bits, &bits = ranks[rank].bits;
    const auto end = first.begin() + static_cast<std::ptrdiff_t>(kBits * parameters.size());
    CAIRN_CHECK(std::equal(first.begin(), end, bits.begin()), "ddp",
                "expected gradients of the same parameters in a step that has to reduce them, got ",
                list_of_local(first, parameters), " on rank 0 and ",
                list_of_local(bits, parameters), " on rank ", rank,
                " (the last micro-batch of a step: no no_sync; or find_unused_parameters)");
  }
}

using Contributions = std::vector<std::shared_ptr<core::Contribution>>;

/// What this rank's gradients are of, which ranks have in common.
struct Losses {
  core::GradientScale of_gradients;
  Contributions of_sums;
};

Losses losses_of(const NamedTensors& parameters) {
  Losses losses;
  bool any_gradient = false;
  for (const auto& [name, tensor] : parameters) {
    const core::GradientSlot& slot = tensor.gradient_slot();
    if (!tensor.requires_grad()) continue;
    if (slot.holds_gradient() || (!any_gradient && slot.has_sum()))
      losses.of_gradients = slot.scale();
    any_gradient = any_gradient || slot.holds_gradient();
    for (const auto& one : slot.sum_contributions()) {
      Contributions& all = losses.of_sums;
      if (!one->over && std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
    }
  }
  return losses;
}

/// As all ranks have them: a rank may know a loss twice (given to other optimizers).
std::set<std::string> names_of(const Contributions& losses) {
  std::set<std::string> names;
  for (const auto& one : losses) names.insert(one->describe());
  return names;
}

/// For each parameter and each of names_of(losses) whether its sum has a part of that loss.
std::vector<bool> sums_of(const Contributions& losses, const NamedTensors& parameters) {
  const std::set<std::string> all = names_of(losses);
  std::vector<bool> bits;
  for (const auto& [name, tensor] : parameters) {
    const auto own = names_of(tensor.gradient_slot().sum_contributions());
    for (const std::string& loss : all) bits.push_back(own.contains(loss));
  }
  return bits;
}

/// What the sum is of, and what it is of on any other rank. `bit`: the first of its sums_of().
Contributions on_any(const std::vector<HeldGradients>& ranks, std::size_t bit, const Losses& losses,
                     const core::GradientSlot& slot) {
  Contributions all = slot.sum_contributions();
  const std::set<std::string> own = names_of(all);
  for (const std::string& name : names_of(losses.of_sums)) {
    const auto has = [&](const HeldGradients& rank) { return rank.bits[bit]; };
    const bool added = !own.contains(name) && std::any_of(ranks.begin(), ranks.end(), has);
    ++bit;
    for (const auto& one : losses.of_sums) {
      if (added && one->describe() == name) all.push_back(one);
    }
  }
  return all;
}

/// A gradient of zeros.
void zero_gradient(const Tensor& parameter, bool f32, const core::GradientScale& scale) {
  core::GradientSlot& slot = parameter.gradient_slot();
  const bool has_place = slot.memory().defined();  // a frozen parameter may have none
  const DType dtype = f32 ? DType::f32 : parameter.dtype();
  if (!has_place)
    slot.place(kernels::empty_with_layout_of(parameter, dtype, core::MemoryCategory::gradients));
  kernels::fill(slot.memory(), 0.0);
  slot.mark_written(scale);
  if (!has_place) slot.displace();
}

/// Zeros, for a gradient or a sum that only other ranks have.
void give_zeros(const Tensor& parameter, const GradientOnRank& wanted, const Losses& losses,
                bool f32) {
  core::GradientSlot& slot = parameter.gradient_slot();
  if (wanted.sum && !slot.has_sum()) {
    if (!slot.sum().defined() || slot.sum().shape() != parameter.shape())
      slot.set_sum(
          kernels::empty_with_layout_of(parameter, DType::f32, core::MemoryCategory::gradients));
    kernels::fill(slot.sum(), 0.0);
    if (!slot.holds_gradient()) slot.set_scale({losses.of_gradients.scaler});
  }
  if (wanted.gradient && !slot.holds_gradient()) zero_gradient(parameter, f32, losses.of_gradients);
}

void all_reduce(const TensorView& gradient, const std::string& name, const ProcessGroup& group,
                const DistributedOptions& options) {
  const ReduceOp op = options.average ? ReduceOp::mean : ReduceOp::sum;
  if (!options.allreduce_always_fp32 || !core::is_half(gradient.dtype))
    return group.all_reduce(gradient, op, name);
  const Tensor wide = Tensor::empty({gradient.numel()}, DType::f32, gradient.device);
  flatten({gradient}, wide);
  group.all_reduce(wide, op, name);
  unflatten(wide, {gradient});
}

Tensor copy_of_part(const Tensor& whole, core::ElementRange range) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::gradients);
  Tensor part = Tensor::empty({range.size()}, whole.dtype(), whole.device());
  kernels::copy(core::part_of(whole, range), part);
  return part;
}

/// Where ranks divide gradients: of what was reduced.
void keep_parts(const Tensor& parameter, const GradientOnRank& reduced,
                const ProcessGroup& shards) {
  core::GradientSlot& slot = parameter.gradient_slot();
  if (slot.placed()) return;  // somebody else's memory
  const auto own = core::even_part(parameter.numel(), shards.rank(), shards.world_size());
  if (reduced.gradient) slot.keep_part(copy_of_part(slot.memory(), own));
  if (reduced.sum) slot.keep_part_of_sum(copy_of_part(slot.sum(), own));
}

}  // namespace

/// A collective where some gradient is this rank's alone: by the rule of a window that is so on
/// every rank or on none. Where losses reach other parameters on other ranks a rank may have none
/// of a window under no_sync: all come then. Throws on every rank, before anything is changed,
/// where ranks hold what cannot go together. Returns whether it came to that.
bool DistributedDataParallel::Impl::reduce_unreduced() {
  if (group.world_size() == 1) return false;
  const bool others_may = finds_unused() && no_sync.was_used() && !uneven_inputs;
  if (!has_anything_to_reduce(parameters) && !others_may) return false;
  if (uneven_inputs)
    fail_everywhere(core::str("expected a backward that reduces before each step inside join(), ",
                              "got a step that has to reduce ",
                              list_of_local(bits_of(parameters), parameters),
                              " (the last micro-batch of a step: no no_sync)"));
  no_sync.compare();
  const Losses losses = losses_of(parameters);
  const auto told = group.world().all_or_throw<core::Error>("what a step has to reduce", [&] {
    check_whole(parameters);
    HeldGradients held{describe_held_losses(parameters), arena->f32_slots(), bits_of(parameters)};
    const std::vector<bool> sums = sums_of(losses.of_sums, parameters);
    held.bits.insert(held.bits.end(), sums.begin(), sums.end());
    return held.pack();
  });
  const std::vector<HeldGradients> ranks = unpack(told);
  if (!finds_unused()) check_same_parameters(ranks, parameters);
  if (any_has_f32_slots(ranks)) arena->use_f32_slots();
  const std::size_t count = parameters.size(), names = names_of(losses.of_sums).size();
  for (std::size_t p = 0; p < count; ++p) {
    GradientOnRank any;
    for (const HeldGradients& rank : ranks) {
      const GradientOnRank held = held_on(rank.bits, p);
      any.local_gradient = any.local_gradient || held.local_gradient;
      any.local_sum = any.local_sum || held.local_sum;
    }
    if (!any.is_local()) continue;
    const auto& [name, tensor] = parameters[p];
    const GradientOnRank wanted{.gradient = any.local_gradient, .sum = any.local_sum};
    give_zeros(tensor, wanted, losses, arena->f32_slots());
    core::GradientSlot& slot = tensor.gradient_slot();
    if (any.local_sum) {
      slot.mark_summed(on_any(ranks, kBits * count + names * p, losses, slot));
      all_reduce(slot.sum(), core::str("gradient ", name, " (sum)"), group, options);
    }
    if (any.local_gradient) all_reduce(slot.memory(), "gradient " + name, group, options);
    slot.mark_sum_reduced();
    if (any.local_gradient) slot.mark_reduced();
    if (shards_gradients()) keep_parts(tensor, wanted, shards);
  }
  no_sync.reduced();
  return true;
}

}  // namespace cairn::parallel
