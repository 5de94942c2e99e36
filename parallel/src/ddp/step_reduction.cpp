// A step reduces what no backward has reduced: gradients of no_sync, sums of losses with scales of
// their own.
#include <algorithm>
#include <set>
#include <string>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/parallel/flatten.h"
#include "ddp/ddp.h"
#include "ddp/held_losses.h"
#include "reducer/names.h"

namespace cairn::parallel {
namespace {

using State = core::GradientSlot::State;

/// What a rank holds of one parameter.
struct GradientOnRank {
  bool gradient = false, local_gradient = false;
  bool sum = false, local_sum = false;

  bool operator==(const GradientOnRank&) const = default;
  bool is_local() const { return local_gradient || local_sum; }
};

/// What a rank holds of all of them.
struct RankGradients {
  std::string losses;      // describe_held_losses()
  bool f32_slots = false;  // of the arena: a rank with nothing to add to may be behind
  std::vector<GradientOnRank> parameters;
  std::vector<bool> sums_of;  // for each parameter and each of names_of(Losses::of_sums)
};

GradientOnRank held_of(const core::GradientSlot& slot) {
  return {.gradient = slot.holds_gradient(),
          .local_gradient = slot.state() == State::local,
          .sum = slot.has_sum(),
          .local_sum = slot.sum_is_local()};
}

/// Also of parameters that were frozen since.
std::vector<GradientOnRank> held_of(const NamedTensors& parameters) {
  std::vector<GradientOnRank> held;
  for (const NamedTensor& one : parameters) held.push_back(held_of(one.tensor.gradient_slot()));
  return held;
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

std::string pack(const RankGradients& own) {
  std::vector<bool> bits;
  for (const GradientOnRank& held : own.parameters)
    bits.insert(bits.end(), {held.gradient, held.local_gradient, held.sum, held.local_sum});
  return core::Packer()
      .text(own.losses)
      .number(own.f32_slots ? 1 : 0)
      .bits(bits)
      .bits(own.sums_of)
      .bytes();
}

RankGradients unpack(const std::string& bytes) {
  core::Unpacker message(bytes);
  RankGradients rank;
  rank.losses = message.text();
  rank.f32_slots = message.number() != 0;
  const std::vector<bool> bits = message.bits();
  for (std::size_t i = 0; i + 3 < bits.size(); i += 4)
    rank.parameters.push_back({bits[i], bits[i + 1], bits[i + 2], bits[i + 3]});
  rank.sums_of = message.bits();
  return rank;
}

std::string list_of_local(const std::vector<GradientOnRank>& held, const NamedTensors& parameters) {
  std::vector<std::string> names;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (held[p].local_gradient) names.push_back(parameters[p].name);
    if (held[p].sum) names.push_back(parameters[p].name + " (sum)");
  }
  return names.empty() ? "none" : join_names(names);
}

void check_same_parameters(const std::vector<RankGradients>& ranks,
                           const NamedTensors& parameters) {
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    CAIRN_CHECK(ranks[rank].parameters == ranks[0].parameters, "ddp",
                "expected gradients of the same parameters in a step that has to reduce them, got ",
                list_of_local(ranks[0].parameters, parameters), " on rank 0 and ",
                list_of_local(ranks[rank].parameters, parameters), " on rank ", rank,
                " (the last micro-batch of a step: no no_sync; or find_unused_parameters)");
  }
}

using Contributions = std::vector<std::shared_ptr<core::Contribution>>;

/// What this rank's gradients are of, which ranks have in common (check_same_losses).
struct Losses {
  core::GradientScale of_gradients;
  Contributions of_sums;
};

bool contains(const Contributions& all, const std::shared_ptr<core::Contribution>& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

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
      if (!one->over && !contains(losses.of_sums, one)) losses.of_sums.push_back(one);
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

std::vector<bool> sums_of(const Contributions& losses, const NamedTensors& parameters) {
  const std::set<std::string> all = names_of(losses);
  std::vector<bool> bits;
  for (const auto& [name, tensor] : parameters) {
    const auto own = names_of(tensor.gradient_slot().sum_contributions());
    for (const std::string& loss : all) bits.push_back(own.contains(loss));
  }
  return bits;
}

/// What the sum is of, and what it is of on any other rank.
Contributions on_any(const std::vector<RankGradients>& ranks, std::size_t parameter,
                     const Losses& losses, const core::GradientSlot& slot) {
  Contributions all = slot.sum_contributions();
  const std::set<std::string> own = names_of(all), names = names_of(losses.of_sums);
  std::size_t at = parameter * names.size();
  for (const std::string& name : names) {
    const auto has = [&](const RankGradients& rank) { return rank.sums_of[at]; };
    const bool added = !own.contains(name) && std::any_of(ranks.begin(), ranks.end(), has);
    ++at;
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
    if (!slot.sum().defined())
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

}  // namespace

/// A collective where some gradient is this rank's alone: by the rule of a window that is so on
/// every rank or on none. Where losses reach other parameters on other ranks a rank may have none
/// of a window under no_sync: all come then. Throws on every rank, before anything is changed,
/// where ranks hold what cannot go together. Returns whether it came to that.
bool DistributedDataParallel::Impl::reduce_unreduced() {
  if (group.world_size() == 1) return false;
  const bool others_may = finds_unused() && no_sync.was_used() && !uneven;
  if (!has_anything_to_reduce(parameters) && !others_may) return false;
  if (uneven)
    fail_everywhere(core::str("expected a backward that reduces before each step inside join(), ",
                              "got a step that has to reduce ",
                              list_of_local(held_of(parameters), parameters),
                              " (the last micro-batch of a step: no no_sync)"));
  no_sync.compare();
  const Losses losses = losses_of(parameters);
  const auto told = group.world().all_or_throw<core::Error>("what a step has to reduce", [&] {
    check_whole(parameters);
    // With find_unused_parameters a loss under no_sync may have reached nothing on some rank.
    return pack({describe_held_losses(parameters, !options.find_unused_parameters),
                 arena->f32_slots(), held_of(parameters), sums_of(losses.of_sums, parameters)});
  });
  std::vector<RankGradients> ranks;
  std::vector<std::string> losses_of_rank;
  for (const std::string& bytes : told) {
    ranks.push_back(unpack(bytes));
    losses_of_rank.push_back(ranks.back().losses);
  }
  check_same_losses(losses_of_rank);
  if (!finds_unused()) check_same_parameters(ranks, parameters);
  const auto has_f32_slots = [](const RankGradients& rank) { return rank.f32_slots; };
  if (std::any_of(ranks.begin(), ranks.end(), has_f32_slots)) arena->use_f32_slots();
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    GradientOnRank any;
    for (const RankGradients& rank : ranks) {
      any.local_gradient = any.local_gradient || rank.parameters[p].local_gradient;
      any.local_sum = any.local_sum || rank.parameters[p].local_sum;
    }
    if (!any.is_local()) continue;
    const auto& [name, tensor] = parameters[p];
    const GradientOnRank wanted{.gradient = any.local_gradient, .sum = any.local_sum};
    give_zeros(tensor, wanted, losses, arena->f32_slots());
    core::GradientSlot& slot = tensor.gradient_slot();
    if (any.local_sum) {
      slot.mark_summed(on_any(ranks, p, losses, slot));
      all_reduce(slot.sum(), core::str("gradient ", name, " (sum)"), group, options);
    }
    if (any.local_gradient) all_reduce(slot.memory(), "gradient " + name, group, options);
    slot.mark_sum_reduced();
    if (any.local_gradient) slot.mark_reduced();
  }
  no_sync.reduced();
  return true;
}

}  // namespace cairn::parallel
