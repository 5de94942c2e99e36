#include "plan/merged_chain.h"

#include <algorithm>

namespace cairn::checkpointing {

namespace {

// The block's way of that number, or its last; a block without any is kept.
const SelectiveBlock* way_of(const BlockProfile& block, std::size_t number) {
  if (block.selective.empty()) return nullptr;
  return &block.selective[std::min(number, block.selective.size() - 1)];
}

// Adds a block behind: peaks are above what stands before the first.
void append(KeptBlock& all, const KeptBlock& block, std::size_t before) {
  all.forward_seconds += block.forward_seconds;
  all.backward_seconds += block.backward_seconds;
  all.replay_peak = std::max(all.forward_peak, before + block.replay_peak);
  all.forward_peak = std::max(all.forward_peak, before + block.forward_peak);
  all.backward_peak = std::max(all.backward_peak, before + block.backward_peak);
  all.saved = before + block.saved;
  all.saves_output = block.saves_output;
  all.tail_seconds = block.tail_seconds;
}

}  // namespace

MergedChain::MergedChain(const std::vector<BlockProfile>& blocks, std::size_t most)
    : blocks_(blocks) {
  const std::size_t n = blocks.size(), count = std::min(n, most);
  for (std::size_t i = 0; i <= count; ++i) begin_.push_back(i * n / count);
  for (std::size_t i = 0; i < count; ++i) merged_.push_back(merge(begin_[i], begin_[i + 1]));
}

BlockProfile MergedChain::merge(std::size_t begin, std::size_t end) const {
  if (end == begin + 1) return blocks_[begin];
  BlockProfile all;
  std::size_t ways = 0;
  bool offloads = true;
  for (std::size_t i = begin; i < end; ++i) {
    const BlockProfile& block = blocks_[i];
    ways = std::max(ways, block.selective.size());
    offloads = offloads && block.offloaded;
    const std::size_t input = i > begin ? blocks_[i - 1].output : 0;
    all.light_peak = std::max(all.light_peak, input + block.light_peak);
    all.cached += block.cached;
    all.parameter_gradients += block.parameter_gradients;
  }
  const auto kept = [&](const auto& way) {
    KeptBlock run;
    for (std::size_t i = begin; i < end; ++i) {
      append(run, way(blocks_[i]), run.saved + (i > begin ? blocks_[i - 1].output : 0));
    }
    run.saves_input = way(blocks_[begin]).saves_input;
    return run;
  };
  using Kept = const KeptBlock&;
  static_cast<KeptBlock&>(all) = kept([](const BlockProfile& b) -> Kept { return b; });
  if (offloads) all.offloaded = kept([](const BlockProfile& b) -> Kept { return *b.offloaded; });
  for (std::size_t k = 0; k < ways; ++k) {
    const auto selective = [k](const BlockProfile& b) -> Kept {
      const SelectiveBlock* way = way_of(b, k);
      return way == nullptr ? static_cast<Kept>(b) : *way;
    };
    // The results differ from block to block: the way is known by its place.
    all.selective.push_back({kept(selective), std::make_shared<std::vector<SegmentOperation>>()});
  }
  const BlockProfile& last = blocks_[end - 1];
  all.output = last.output;
  all.gradient = last.gradient;
  all.lead = last.lead;
  return all;
}

Schedule MergedChain::expanded(const Schedule& schedule) const {
  Schedule all;
  for (const SchedulePart& part : schedule) expand(part, all);
  return all;
}

void MergedChain::expand(const SchedulePart& part, Schedule& schedule) const {
  const std::size_t begin = begin_[part.begin], end = begin_[part.end];
  if (!part.inner.empty()) {
    schedule.push_back({begin, end, expanded(part.inner)});
    return;
  }
  if (end == begin + 1) {
    schedule.push_back({begin, end, {}, part.offloaded, part.results});
    return;
  }
  const std::vector<SelectiveBlock>& ways = merged_[part.begin].selective;
  const auto known = std::find_if(ways.begin(), ways.end(),
                                  [&](const auto& way) { return way.results == part.results; });
  for (std::size_t i = begin; i < end; ++i) {
    SchedulePart one{i, i + 1, {}, part.offloaded};
    const auto* way = way_of(blocks_[i], static_cast<std::size_t>(known - ways.begin()));
    if (part.results && way != nullptr) one.results = way->results;
    schedule.push_back(one);
  }
}

}  // namespace cairn::checkpointing
