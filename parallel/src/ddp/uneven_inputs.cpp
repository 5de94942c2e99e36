#include "ddp/uneven_inputs.h"

#include <algorithm>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"

namespace cairn::parallel {

UnevenInputs::Ranks UnevenInputs::announce(Next next, const ProcessGroup& group) {
  const std::string own = core::Packer()
                              .number(static_cast<std::uint64_t>(next))
                              .number(static_cast<std::uint64_t>(samples_))
                              .bytes();
  Ranks ranks;
  Next active = Next::out_of_batches;
  for (const std::string& told : group.exchange(own, "join")) {
    core::Unpacker message(told);
    Rank& rank = ranks.emplace_back();
    rank.next = static_cast<Next>(message.number());
    rank.samples = static_cast<std::int64_t>(message.number());
    if (rank.next == Next::out_of_batches) continue;
    CAIRN_CHECK(active == Next::out_of_batches || active == rank.next, "ddp",
                "expected the ranks that have a batch to be at the same place inside join(), ",
                "got a forward and a backward");
    active = rank.next;
  }
  return ranks;
}

UnevenInputs::Weights UnevenInputs::begin_backward(const ProcessGroup& group, bool average) {
  CAIRN_CHECK(shadows() || !over_, "ddp",
              "expected no backward after other_ranks_have_batches() has ",
              "returned false, got one");
  double active = 0, samples = 0;
  for (const Rank& rank : shadows() ? shadowed_ : announce(Next::backward, group)) {
    if (rank.next != Next::backward) continue;
    active += 1;
    samples += static_cast<double>(rank.samples);
  }
  const double world = group.world_size();
  if (divide_by_ == DivideBy::samples) {
    CAIRN_CHECK(samples > 0, "ddp", "expected samples() before a backward inside a join() that ",
                "divides by samples, got 0 on every rank");
    const double own = shadows() ? 0.0 : static_cast<double>(samples_);
    samples_ = 0;
    return {.before = own * world / samples};
  }
  if (divide_by_ == DivideBy::participants && average) return {.after = world / active};
  return {};
}

UnevenInputs::Others UnevenInputs::next_of_others(const ProcessGroup& group) {
  CAIRN_CHECK(!shadows(), "ddp", "expected a backward of zero() after other_ranks_have_batches(), ",
              "got other_ranks_have_batches() again");
  samples_ = 0;
  const Ranks ranks = announce(Next::out_of_batches, group);
  const auto active = std::find_if(ranks.begin(), ranks.end(), [](const Rank& rank) {
    return rank.next != Next::out_of_batches;
  });
  over_ = active == ranks.end();
  if (over_) return {};
  if (active->next == Next::backward) shadowed_ = ranks;
  return {active->next, static_cast<int>(active - ranks.begin())};
}

}  // namespace cairn::parallel
