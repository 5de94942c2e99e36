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

/// What a rank has of a parameter.
struct Held {
  char kind = '-';      // nothing; 'g': a gradient, 's': a sum, 'b': a broken one
  char place = '-';     // 'l': this rank's own, 'r': reduced
  char scaler = '-';    // 'n': nobody, 'a': an amp::Amp
  double factor = 1.0;  // of a gradient's scale

  bool operator==(const Held&) const = default;
  bool is_nothing() const { return kind == '-'; }
  bool is_broken() const { return kind == 'b'; }
  bool is_sum() const { return kind == 's'; }
  bool is_local() const { return place == 'l'; }
};
using AllHeld = std::vector<Held>;  // by parameter

Held held_of(const Tensor& parameter) {
  const core::GradientSlot* slot = parameter.gradient_slot_or_null();
  if (slot == nullptr || !parameter.requires_grad()) return {};
  if (slot->state() == core::GradientSlot::State::broken) return {'b', '-', '-', 1.0};
  if (!slot->has_sum() && !slot->holds_gradient()) return {};
  const char place = slot->needs_reduction() ? 'l' : 'r';
  const char scaler = slot->scale().scaler == 0 ? 'n' : 'a';
  return slot->has_sum() ? Held{'s', place, scaler, 1.0}
                         : Held{'g', place, scaler, slot->scale().factor};
}

/// Neighbours that are alike are told once.
std::string text_of(const AllHeld& all) {
  std::string text;
  for (std::size_t i = 0, end = 0; i < all.size(); i = end) {
    while (end < all.size() && all[end] == all[i]) ++end;
    text += core::str(end - i, " ", all[i].kind, " ", all[i].place, " ", all[i].scaler, " ",
                      std::bit_cast<std::uint64_t>(all[i].factor), "\n");
  }
  return text;
}

AllHeld parse_held(const std::string& text) {
  AllHeld all;
  std::istringstream in(text);
  std::size_t count = 0;
  std::uint64_t bits = 0;
  for (Held held; in >> count >> held.kind >> held.place >> held.scaler >> bits;) {
    held.factor = std::bit_cast<double>(bits);
    all.insert(all.end(), count, held);
  }
  return all;
}

/// What the ranks have of one parameter that some have a local part of.
struct Whole {
  bool is_local = false;
  bool as_sum = false;  // the parts add up in sums only
  core::GradientScale scale;
};

Whole whole_of(const std::vector<AllHeld>& ranks, std::size_t parameter) {
  Whole whole;
  const Held* first = nullptr;
  for (const AllHeld& rank : ranks) {
    const Held& held = rank.at(parameter);
    whole.is_local = whole.is_local || held.is_local();
    if (held.is_nothing()) continue;
    if (first == nullptr) first = &held;
    whole.as_sum = whole.as_sum || held.is_sum() || held.factor != first->factor;
  }
  if (first != nullptr) whole.scale = {first->scaler == 'a' ? core::kSomeScaler : 0, first->factor};
  return whole;
}

/// The slot's part of a gradient that is reduced now.
void take_part(const Tensor& parameter, const Held& held, const Whole& whole, bool keeps_reduced) {
  core::GradientSlot& slot = parameter.gradient_slot();
  const bool only_sum = held.is_sum() && !slot.holds_gradient();
  if (held.is_nothing() && !slot.placed()) slot.set_own(Tensor::empty_like(parameter));
  if (held.is_nothing() || (!held.is_local() && !keeps_reduced)) {
    if (slot.has_sum()) kernels::fill(slot.sum(), 0.0);
    if (!only_sum) kernels::fill(slot.memory(), 0.0);
  }
  if (held.is_nothing()) {
    slot.mark_written(whole.scale);
  } else if (!held.is_local()) {
    slot.mark_written(slot.scale());
    if (only_sum) slot.mark_stashed();
  }
  if (!whole.as_sum || slot.has_sum()) return;
  if (!slot.sum().defined()) {
    slot.set_sum(kernels::empty_beside(parameter, DType::f32, core::MemoryCategory::gradients));
  }
  kernels::affine(slot.memory(), 1.0 / slot.scale().factor, 0.0, slot.sum());
  slot.mark_stashed();
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

std::string list_of_local(const AllHeld& held, const NamedTensors& parameters) {
  std::vector<std::string> names;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (held.at(p).is_local()) names.push_back(parameters[p].name);
  }
  return names.empty() ? "none" : join_names(names);
}

void check_same_parts(const std::vector<AllHeld>& ranks, const NamedTensors& parameters) {
  const auto same = [](const Held& a, const Held& b) { return a.is_local() == b.is_local(); };
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const AllHeld &first = ranks[0], &own = ranks[rank];
    CAIRN_CHECK(std::equal(first.begin(), first.end(), own.begin(), own.end(), same), "ddp",
                "expected gradients of the same parameters in a step that has to reduce them, got ",
                list_of_local(first, parameters), " on rank 0 and ", list_of_local(own, parameters),
                " on rank ", rank,
                " (the last micro-batch of a step: no no_sync; or find_unused_parameters)");
  }
}

}  // namespace

/// Afterwards every rank has a part, local and of one kind, of whatever some rank has a local part of. Where losses may reach
/// other parameters on each rank, zeros stand for what only other ranks' losses reached. Throws on every rank, before anything is
/// changed, where that cannot be.
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
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Whole whole = whole_of(ranks, p);
    if (!whole.is_local) continue;
    take_part(parameters[p].tensor, own[p], whole, keeps_reduced());
  }
  agreed = true;
}

void DistributedDataParallel::Impl::reduce(const std::vector<Part>& parts) {
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

}  // namespace cairn::parallel
