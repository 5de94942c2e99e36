// What no backward has reduced by the time of a step or a stash: the step averages it.
#include <algorithm>
#include <bit>
#include <sstream>

#include "cairn/core/error.h"
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
  double factor = 1.0;  // of a gradient's scale

  bool is_nothing() const { return kind == '-'; }
  bool is_broken() const { return kind == 'b'; }
  bool is_local() const { return place == 'l'; }
  bool adds_up_with(const Held& other) const {
    return kind == other.kind && factor == other.factor;
  }
};

Held held_by(const core::GradientSlot& slot) {
  if (slot.state() == core::GradientSlot::State::broken) return {'b', '-', 1.0};
  if (!slot.has_sum() && !slot.holds_gradient()) return {};
  const char place = slot.needs_reduction() ? 'l' : 'r';
  return slot.has_sum() ? Held{'s', place, 1.0} : Held{'g', place, slot.scale().factor};
}

std::string text_of(const Held& held) {
  return core::str(held.kind, " ", held.place, " ", std::bit_cast<std::uint64_t>(held.factor),
                   "\n");
}

std::vector<Held> parse_held(const std::string& text) {
  std::vector<Held> all;
  std::istringstream in(text);
  std::uint64_t bits = 0;
  for (Held held; in >> held.kind >> held.place >> bits;) {
    held.factor = std::bit_cast<double>(bits);
    all.push_back(held);
  }
  return all;
}

std::string words_for(const Held& held) {
  if (held.is_nothing()) return "none";
  return core::str(held.is_local() ? "one of its own" : "a reduced one",
                   held.kind == 's' ? " that is a sum" : "",
                   held.factor == 1.0 ? "" : core::str(" scaled by ", held.factor));
}

}  // namespace

/// Where losses may reach other parameters on each rank, zeros stand for what only other ranks' losses reached. Throws on every
/// rank, before anything is changed, where what the ranks have does not add up.
void DistributedDataParallel::Impl::share_what_is_local() {
  if (!finds_unused() || (agreed && reduces())) return;
  std::string own;
  for (std::size_t i = 0; i < trained.size(); ++i) own += text_of(held_by(slot_of(i)));
  std::vector<std::vector<Held>> ranks;
  for (const std::string& text : group.exchange(own, "what a step has to reduce"))
    ranks.push_back(parse_held(text));
  std::vector<const Held*> local(trained.size(), nullptr);
  for (std::size_t i = 0; i < trained.size(); ++i) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].at(i).is_broken())
        core::fail<core::Error>("ddp", "expected whole gradients on all ranks, got '",
                                parameter_of(i).name, "' on rank ", rank,
                                ", which a backward that failed there had changed in part: "
                                "clear_grad() drops it");
    }
    const auto first = std::find_if(ranks.begin(), ranks.end(), [&](const std::vector<Held>& rank) {
      return rank.at(i).is_local();
    });
    if (first == ranks.end()) continue;
    local[i] = &first->at(i);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const Held& other = ranks[rank].at(i);
      const bool is_zero = other.is_nothing() && local[i]->kind == 'g';
      CAIRN_CHECK(is_zero || other.adds_up_with(*local[i]), "ddp",
                  "expected gradients that add up on all ranks in a step that has to reduce '",
                  parameter_of(i).name, "', got ", words_for(*local[i]), " on rank ",
                  first - ranks.begin(), " and ", words_for(other), " on rank ", rank,
                  " (the last micro-batch of a step: no no_sync)");
    }
  }
  for (std::size_t i = 0; i < trained.size(); ++i) {
    core::GradientSlot& slot = slot_of(i);
    const Held held = held_by(slot);
    if (local[i] == nullptr || held.is_local()) continue;
    if (held.is_nothing()) kernels::fill(slot.memory(), 0.0);
    const bool only_sum = held.kind == 's' && !slot.holds_gradient();
    slot.mark_written(held.is_nothing() ? core::GradientScale{scale.scaler, local[i]->factor}
                                        : core::GradientScale(slot.scale()));
    if (only_sum) slot.mark_stashed();
  }
  agreed = true;
}

void DistributedDataParallel::Impl::reduce(const std::vector<Part>& parts) {
  if (uneven)
    fail_everywhere(core::str(
        "expected a backward that reduces before each step inside join(), got "
        "a step that has to reduce 'gradient ",
        parts.empty() ? "" : parts[0].name, "' (the last micro-batch of a step: no no_sync)"));
  if (!finds_unused()) check_same_parts(parts);
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

void DistributedDataParallel::Impl::check_same_parts(const std::vector<Part>& parts) const {
  std::string own;
  for (const Part& part : parts) own += part.name + "\n";
  const auto ranks = group.exchange(own, "the gradients that a step has to reduce");
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    CAIRN_CHECK(ranks[rank] == ranks[0], "ddp",
                "expected gradients of the same parameters in a step that has to reduce them, got ",
                join_names(lines_of(ranks[0])), " on rank 0 and ",
                join_names(lines_of(ranks[rank])), " on rank ", rank,
                " (the last micro-batch of a step: no no_sync; or find_unused_parameters)");
  }
}

}  // namespace cairn::parallel
