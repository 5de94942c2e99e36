// What no backward has reduced by the time of a step or a stash: the step averages it.
#include <algorithm>
#include <bit>
#include <sstream>

#include "cairn/core/error.h"
#include "cairn/core/scaler.h"
#include "cairn/kernels/beside.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/parallel/flatten.h"
#include "ddp/ddp_impl.h"
#include "ddp/names.h"

namespace cairn::parallel {
namespace {

constexpr char kNone = '-', kLocal = 'l', kReduced = 'r', kBroken = 'b';

/// What a rank has of a parameter.
struct Held {
  char gradient = kNone, sum = kNone;
  char scaler = '-';    // 'n': nobody, 'a': an amp::Amp
  double factor = 1.0;  // of the gradient's scale

  bool operator==(const Held&) const = default;
  bool is_broken() const { return gradient == kBroken; }
  bool has_gradient() const { return gradient != kNone; }
  bool is_local() const { return gradient == kLocal || sum == kLocal; }
};
using AllHeld = std::vector<Held>;  // by parameter

Held held_of(const Tensor& parameter) {
  const core::GradientSlot* slot = parameter.gradient_slot_or_null();
  if (slot == nullptr || !parameter.requires_grad()) return {};
  if (slot->state() == core::GradientSlot::State::broken) return {.gradient = kBroken};
  Held held;
  if (slot->holds_gradient()) {
    held.gradient = slot->state() == core::GradientSlot::State::local ? kLocal : kReduced;
    held.factor = slot->scale().factor;
  }
  if (slot->has_sum()) held.sum = slot->sum_is_local() ? kLocal : kReduced;
  if (held.has_gradient() || slot->has_sum()) held.scaler = slot->scale().scaler == 0 ? 'n' : 'a';
  return held;
}

/// Neighbours that are alike are told once.
std::string text_of(const AllHeld& all) {
  std::string text;
  for (std::size_t i = 0, end = 0; i < all.size(); i = end) {
    while (end < all.size() && all[end] == all[i]) ++end;
    text += core::str(end - i, " ", all[i].gradient, " ", all[i].sum, " ", all[i].scaler, " ",
                      std::bit_cast<std::uint64_t>(all[i].factor), "\n");
  }
  return text;
}

AllHeld parse_held(const std::string& text) {
  AllHeld all;
  std::istringstream in(text);
  std::size_t count = 0;
  std::uint64_t bits = 0;
  for (Held held; in >> count >> held.gradient >> held.sum >> held.scaler >> bits;) {
    held.factor = std::bit_cast<double>(bits);
    all.insert(all.end(), count, held);
  }
  return all;
}

/// What the ranks have of one parameter, of gradients or of sums.
struct Kind {
  bool some = false, all = true, local = false;

  void add(char held) {
    some = some || held != kNone;
    all = all && held != kNone;
    local = local || held == kLocal;
  }
  /// Ranks that lack a loss have stashed other gradients than the rest, reduced ones too: only the mean of each is right.
  bool is_reduced() const { return local || (some && !all); }
};

/// What they reduce of it.
struct Whole {
  bool gradient = false, sum = false;
  bool at_one_scale = true;  // all ranks' gradients
  core::GradientScale scale;
};

/// apart: some ranks may have lacked losses, and their sums be of other ones.
Whole whole_of(const std::vector<AllHeld>& ranks, std::size_t parameter, bool apart) {
  Whole whole;
  Kind gradients, sums;
  for (const AllHeld& rank : ranks) {
    const Held& held = rank.at(parameter);
    if (held.scaler == 'a') whole.scale.scaler = core::kSomeScaler;
    if (held.has_gradient()) {
      whole.at_one_scale =
          whole.at_one_scale && (!gradients.some || held.factor == whole.scale.factor);
      whole.scale.factor = held.factor;
    }
    gradients.add(held.gradient);
    sums.add(held.sum);
  }
  whole.gradient = gradients.is_reduced();
  whole.sum = sums.is_reduced() || (apart && sums.some);
  return whole;
}

/// Zeros, for what only other ranks have, at their scale.
void give_gradient(const Tensor& parameter, const core::GradientScale& scale) {
  core::GradientSlot& slot = parameter.gradient_slot();
  if (!slot.placed()) slot.place(Tensor::empty_like(parameter));
  kernels::fill(slot.memory(), 0.0);
  slot.mark_written({slot.has_sum() ? slot.scale().scaler : scale.scaler, scale.factor});
}

void give_sum(const Tensor& parameter, const core::GradientScale& scale) {
  core::GradientSlot& slot = parameter.gradient_slot();
  const bool holds = slot.holds_gradient();
  const bool reduced = slot.holds_reduced();
  const core::GradientScale own = holds ? slot.scale() : core::GradientScale{scale.scaler, 1.0};
  const Tensor memory = slot.memory();
  if (!slot.sum().defined())
    slot.set_sum(kernels::empty_beside(parameter, DType::f32, core::MemoryCategory::gradients));
  kernels::fill(slot.sum(), 0.0);
  slot.mark_written(own);
  slot.mark_stashed();
  if (!holds) return;
  if (!slot.placed()) slot.place(memory);
  slot.mark_written(own);
  if (reduced) slot.mark_reduced();
}

/// Gradients of several scales add up in sums only.
void move_to_sum(core::GradientSlot& slot) {
  const double scale = 1.0 / slot.scale().factor;
  switch (slot.stash()) {
    case core::GradientSlot::Stash::add:
      kernels::axpby(scale, slot.memory(), 1.0, slot.sum());
      break;
    case core::GradientSlot::Stash::overwrite:
      kernels::affine(slot.memory(), scale, 0.0, slot.sum());
      break;
    case core::GradientSlot::Stash::drop:
      break;
  }
  slot.mark_stashed();
}

/// What all ranks reduce in place.
struct Part {
  TensorView gradient;
  std::string name;
};

/// This rank's part of what all reduce now.
void take_part(const NamedTensor& parameter, const Whole& whole, bool keeps_reduced,
               std::vector<Part>& parts) {
  core::GradientSlot& slot = parameter.tensor.gradient_slot();
  const bool in_sum = whole.gradient && !whole.at_one_scale;
  if ((whole.sum || in_sum) && !slot.has_sum()) give_sum(parameter.tensor, whole.scale);
  if (in_sum && slot.holds_gradient()) move_to_sum(slot);
  if (whole.sum || in_sum) {
    if (!slot.sum_is_local() && !keeps_reduced) kernels::fill(slot.sum(), 0.0);
    parts.push_back({slot.sum(), parameter.name + " (sum)"});
  }
  if (!whole.gradient || in_sum) return;
  if (!slot.holds_gradient()) give_gradient(parameter.tensor, whole.scale);
  if (slot.holds_reduced() && !keeps_reduced) kernels::fill(slot.memory(), 0.0);
  parts.push_back({slot.memory(), parameter.name});
}

void check_whole(const std::vector<AllHeld>& ranks, const NamedTensors& parameters) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (!ranks[rank].at(p).is_broken()) continue;
      core::fail<core::Error>(
          "ddp", "expected whole gradients on all ranks, got '", parameters[p].name, "' on rank ",
          rank,
          ", which a backward that failed there had changed in part: ", "clear_grad() drops it");
    }
  }
}

/// Some step would refuse what a rank has, whoever takes it.
void check_scalers(const std::vector<AllHeld>& ranks, const NamedTensors& parameters) {
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const auto has = [&](char scaler) {
      return std::find_if(ranks.begin(), ranks.end(),
                          [&](const AllHeld& rank) { return rank.at(p).scaler == scaler; }) -
             ranks.begin();
    };
    const auto nobody = has('n'), amp = has('a'), none = std::ssize(ranks);
    CAIRN_CHECK(nobody == none || amp == none, "ddp", "expected gradients of '", parameters[p].name,
                "' that amp scaled on every rank or on none, got one on rank ", amp,
                " and one that nobody scaled on rank ", nobody,
                " (precision.backward() for every loss of a step; or clear_grad() first)");
  }
}

std::string list_of_parts(const AllHeld& held, const NamedTensors& parameters) {
  std::vector<std::string> names;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (held.at(p).gradient == kLocal) names.push_back(parameters[p].name);
    if (held.at(p).sum != kNone) names.push_back(parameters[p].name + " (sum)");
  }
  return names.empty() ? "none" : join_names(names);
}

void check_same_parts(const std::vector<AllHeld>& ranks, const NamedTensors& parameters) {
  const auto same = [](const Held& a, const Held& b) {
    if (a.is_local() || b.is_local()) return a.is_local() == b.is_local();
    return (a.sum == kNone) == (b.sum == kNone);
  };
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const AllHeld &first = ranks[0], &own = ranks[rank];
    CAIRN_CHECK(std::equal(first.begin(), first.end(), own.begin(), own.end(), same), "ddp",
                "expected gradients of the same parameters in a step that has to reduce them, got ",
                list_of_parts(first, parameters), " on rank 0 and ", list_of_parts(own, parameters),
                " on rank ", rank,
                " (the last micro-batch of a step: no no_sync; or find_unused_parameters)");
  }
}

void reduce_parts(const std::vector<Part>& parts, const ProcessGroup& group,
                  const DistributedOptions& options) {
  const ReduceOp op = options.average ? ReduceOp::mean : ReduceOp::sum;
  for (const auto& [gradient, name] : parts) {
    const std::string text = "gradient " + name;
    if (!options.allreduce_always_fp32 || !core::is_half(gradient.dtype)) {
      group.all_reduce(gradient, op, text);
      continue;
    }
    const Tensor wide = Tensor::empty({gradient.numel()}, DType::f32, gradient.device);
    flatten({gradient}, wide);
    group.all_reduce(wide, op, text);
    unflatten(wide, {gradient});
  }
}

}  // namespace

/// Reduces whatever some rank has a local part of. Where losses may reach other parameters on each rank, zeros stand for what only
/// other ranks' losses reached. Throws on every rank, before anything is changed, where that cannot be.
void DistributedDataParallel::Impl::share_what_is_local() {
  AllHeld own;
  for (const auto& [name, tensor] : parameters) {
    own.push_back(held_of(tensor));
    if (!uneven || !own.back().is_local()) continue;
    fail_everywhere(
        core::str("expected a backward that reduces before each step inside join(), got ",
                  "a step that has to reduce 'gradient ", name,
                  "' (the last micro-batch of a step: no no_sync)"));
  }
  std::vector<AllHeld> ranks;
  bool wide = false;
  for (const std::string& text :
       group.exchange(slots_letter() + text_of(own), "what a step has to reduce")) {
    wide = wide || text[0] == kWide;
    ranks.push_back(parse_held(text.substr(1)));
  }
  check_whole(ranks, parameters);
  check_scalers(ranks, parameters);
  if (!finds_unused()) check_same_parts(ranks, parameters);
  if (wide) arena->use_f32_slots();
  std::vector<Part> parts;
  std::vector<core::GradientSlot*> reduced;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Whole whole = whole_of(ranks, p, apart);
    if (!whole.gradient && !whole.sum) continue;
    take_part(parameters[p], whole, keeps_reduced(), parts);
    reduced.push_back(&parameters[p].tensor.gradient_slot());
  }
  reduce_parts(parts, group, options);
  for (core::GradientSlot* slot : reduced) {
    slot->mark_reduced();
    slot->mark_sum_reduced();
  }
  agreed = std::all_of(ranks.begin(), ranks.end(), [&](const AllHeld& r) { return r == ranks[0]; });
  accumulated =
      true;  // a rank that lacked a loss may stash less than the others, ahead of the next one
}

}  // namespace cairn::parallel
