#include "plan/chain_schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

namespace {

bool needs_something(const KeptBlock& block) {
  return block.saved > 0 || block.saves_input || block.saves_output;
}

// What a backward has made when the replay of a segment that ends with this block begins: in the
// last block that needs something of it.
std::size_t lead_of(const std::vector<BlockProfile>& blocks, std::size_t last) {
  while (last > 0 && !needs_something(blocks[last])) --last;
  return blocks[last].lead;
}

}  // namespace

// ---- Simulation

namespace {

class Simulation {
 public:
  Simulation(const std::vector<BlockProfile>& blocks, const ChainBeside& beside)
      : blocks_(blocks),
        users_(blocks.size() + 1),
        memory_(blocks.size() + 1),
        beside_(beside.blocks),
        weights_(beside.blocks),
        gradients_(beside.gradients) {
    // A result that is a view lies in the memory of the input.
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      memory_[i + 1] = blocks[i].output == 0 ? memory_[i] : i + 1;
    }
    users_[0] = 1;  // the caller has the input
  }

  ScheduleCost run(const Schedule& schedule) {
    first_ = true;
    forward(schedule);
    first_ = false;
    weights_.let_go_of_all();
    for (const SchedulePart& part : schedule) {
      for (std::size_t i = part.begin; i < part.end; ++i)
        level_ -= blocks_[i].cached - kept_casts(part, i);  // the region's, that end with it
    }
    run_loss();
    gradient_ = blocks_.back().gradient;
    level_ += gradient_;
    gradients_ = 0;
    backward(schedule);
    return cost_;
  }

 private:
  static bool keeps_graph(const SchedulePart& part) { return part.inner.empty() && !part.results; }

  // Of the block's half copies of weights.
  std::size_t kept_casts(const SchedulePart& part, std::size_t i) const {
    return keeps_graph(part) ? blocks_[i].cached_and_kept : 0;
  }

  std::size_t bytes(std::size_t i) const { return i == 0 ? 0 : blocks_[i - 1].output; }

  // The i-th activation, the input of block i.
  void hold(std::size_t i) {
    i = memory_[i];
    if (users_[i]++ == 0) level_ += bytes(i);
  }
  void release(std::size_t i) {
    i = memory_[i];
    if (--users_[i] == 0) level_ -= bytes(i);
  }
  void reach(std::size_t above) { cost_.peak = std::max(cost_.peak, level_ + above); }
  // While the block runs; its weights come first.
  void reach(std::size_t block, std::size_t above) {
    reach(above + weights_.bring(block, !first_) + gradients_);
    if (first_) weights_.let_go(block);
  }

  // Leaves the result held, and the input as it was. A replay ends with the last tensor that its
  // last block keeps.
  void forward(const Schedule& schedule) {
    hold(schedule.front().begin);
    for (const SchedulePart& part : schedule) {
      if (part.inner.empty()) {
        keep(part, !first_ && &part == &schedule.back());
      } else {
        hold(part.begin);  // the segment's
        pass(part.inner);
      }
      release(part.begin);
    }
  }

  const KeptBlock& kept_as(const SchedulePart& part) const {
    const BlockProfile& block = blocks_[part.begin];
    if (!part.results) return part.offloaded ? *block.offloaded : block;
    const auto way = std::find_if(block.selective.begin(), block.selective.end(),
                                  [&](const auto& w) { return w.results == part.results; });
    CAIRN_CHECK(way != block.selective.end(), "simulate", "expected a way of block ", part.begin,
                " that was measured, got another one");
    return *way;
  }

  void keep(const SchedulePart& part, bool ends_replay) {
    const KeptBlock& kept = kept_as(part);
    const std::size_t i = part.begin;
    const std::size_t casts = blocks_[i].cached;
    const std::size_t staying = first_ ? casts : kept_casts(part, i);
    level_ += staying;
    std::size_t peak = ends_replay ? kept.replay_peak : kept.forward_peak;
    if (ends_with_loss(i)) peak = blocks_[i].peak_before_loss;
    reach(i, peak + casts - staying);
    cost_.seconds += kept.forward_seconds - (ends_replay ? kept.tail_seconds : 0);
    level_ += kept.saved;
    if (kept.saves_input) hold(i);
    if (kept.saves_output) hold(i + 1);
    hold(i + 1);
  }

  bool ends_with_loss(std::size_t i) const { return blocks_[i].peak_before_loss > 0; }

  // The loss is behind the region, and nobody holds the last block's input for it.
  void run_loss() {
    const BlockProfile& last = blocks_.back();
    if (ends_with_loss(blocks_.size() - 1))
      reach(last.forward_peak - last.saved - last.output + gradients_);
  }

  // Runs without keeping anything but the result. Whoever calls a segment holds its input until it
  // returns.
  void pass(const Schedule& parts) {
    for (const SchedulePart& part : parts) {
      if (part.inner.empty()) {
        pass(part.begin);
      } else {
        pass(part.inner);
      }
      if (part.begin > parts.front().begin) release(part.begin);
    }
  }

  void pass(std::size_t i) {
    if (first_) level_ += blocks_[i].cached;
    reach(i, blocks_[i].light_peak + (first_ ? 0 : blocks_[i].cached));
    cost_.seconds += blocks_[i].forward_seconds;
    hold(i + 1);
  }

  void backward(const Schedule& schedule) {
    for (auto part = schedule.rbegin(); part != schedule.rend(); ++part) {
      if (part->inner.empty()) {
        backward_of(*part);
        continue;
      }
      const std::size_t lead = lead_of(blocks_, part->end - 1);
      level_ += lead;
      forward(part->inner);
      level_ -= lead;
      release(part->end);
      release(part->begin);
      backward(part->inner);
    }
  }

  void backward_of(const SchedulePart& part) {
    const KeptBlock& kept = kept_as(part);
    const std::size_t i = part.begin;
    const BlockProfile& block = blocks_[i];
    const std::size_t there = kept.saved + (kept.saves_output ? block.output : 0) + block.gradient;
    if (!beside_.empty()) gradients_ = beside_[i].gradients;
    reach(i, kept.backward_peak > there ? kept.backward_peak - there : 0);
    weights_.let_go(i);
    cost_.seconds += kept.backward_seconds;
    level_ -= kept.saved + kept_casts(part, i) + gradient_;
    if (kept.saves_output) release(i + 1);
    if (kept.saves_input) release(i);
    gradient_ = i == 0 ? 0 : blocks_[i - 1].gradient;
    level_ += gradient_ + block.parameter_gradients;
    // The caller of the backward has the result's.
    if (i + 1 == blocks_.size()) level_ += block.gradient;
  }

  const std::vector<BlockProfile>& blocks_;
  std::vector<int> users_;           // of each activation's memory
  std::vector<std::size_t> memory_;  // whose memory each activation lies in
  std::size_t level_ = 0;
  bool first_ = false;        // the chain runs for the first time, in the autocast region
  std::size_t gradient_ = 0;  // of what the backward has come to
  const std::vector<BlockBeside>& beside_;
  GatheredWeights weights_;
  std::size_t gradients_;  // of parameters, that stand beside
  ScheduleCost cost_;
};

}  // namespace

ScheduleCost simulate(const std::vector<BlockProfile>& blocks, const Schedule& schedule,
                      const ChainBeside& beside) {
  return Simulation(blocks, beside).run(schedule);
}

Schedule plain_schedule(std::size_t blocks) {
  Schedule schedule;
  for (std::size_t i = 0; i < blocks; ++i) schedule.push_back({i, i + 1});
  return schedule;
}

// ---- The dynamic programme

namespace {

std::size_t highest_of(const KeptBlock& block) {
  return std::max(block.forward_peak, block.backward_peak);
}

}  // namespace

std::size_t ChainProgramme::steps_of(std::size_t bytes) const {
  return (bytes + unit_ - 1) / unit_;
}

// In the order of part_of.
std::vector<ChainProgramme::Way> ChainProgramme::ways_of(const BlockProfile& block) const {
  const auto way = [&](const KeptBlock& k, std::size_t casts) {
    return Way{steps_of(k.saved + casts + block.output), steps_of(k.forward_peak + block.cached),
               steps_of(k.replay_peak + block.cached),   steps_of(k.backward_peak + block.cached),
               k.forward_seconds + k.backward_seconds,   k.tail_seconds};
  };
  std::vector<Way> ways{way(block, block.cached)};
  for (const SelectiveBlock& selective : block.selective) ways.push_back(way(selective, 0));
  if (block.offloaded) {
    ways.push_back(way(*block.offloaded, block.cached));
    ways.back().outside_only = true;
  }
  return ways;
}

SchedulePart ChainProgramme::part_of(std::size_t block, std::size_t way) const {
  SchedulePart part{block, block + 1};
  const auto& selective = blocks_[block].selective;
  if (way > selective.size()) part.offloaded = true;
  if (way > 0 && !part.offloaded) part.results = selective[way - 1].results;
  return part;
}

ChainProgramme::ChainProgramme(const std::vector<BlockProfile>& blocks, std::size_t slots)
    : blocks_(blocks), later_(blocks.size()) {
  const std::size_t n = blocks.size();
  std::size_t most = 0, highest = 0;
  for (const BlockProfile& b : blocks) {
    most += b.saved + b.cached + b.output + b.parameter_gradients;
    highest = std::max({highest, b.light_peak + b.cached, highest_of(b) + b.cached});
    for (const auto& way : b.selective) highest = std::max(highest, highest_of(way) + b.cached);
    if (b.offloaded) highest = std::max(highest, highest_of(*b.offloaded) + b.cached);
  }
  std::size_t largest_gradient = 0;
  for (std::size_t i = 0; i < n; ++i) {
    largest_gradient = std::max(largest_gradient, blocks[i].gradient + lead_of(blocks, i));
  }
  most += highest + largest_gradient;
  unit_ = slots == 0 ? 1 : std::max<std::size_t>(1, most / slots);
  // Rounding up may take a step for each block and condition.
  steps_ = most / unit_ + (slots == 0 ? 0 : n + 4);
  for (std::size_t i = 0; i < n; ++i) {
    const BlockProfile& b = blocks[i];
    sizes_.push_back({steps_of(b.output), steps_of(b.light_peak + b.cached),
                      steps_of(b.gradient + lead_of(blocks, i)), ways_of(b)});
  }
  sizes_.back().gradient = 0;  // the backward has not begun when the chain first runs
  std::size_t gradients = 0;
  for (std::size_t i = n; i-- > 0; gradients += blocks[i].parameter_gradients) {
    later_[i] = steps_of(gradients);
  }
  cost_.assign(index(n - 1, n - 1, steps_) + 1, std::numeric_limits<float>::infinity());
  choice_.assign(cost_.size(), kNone);
  for (std::size_t length = 1; length <= n; ++length) {
    for (std::size_t s = 0; s + length <= n; ++s) solve(s, s + length - 1);
  }
}

// Ranges s .. t in rows of t.
std::size_t ChainProgramme::index(std::size_t s, std::size_t t, std::size_t m) const {
  return (t * (t + 1) / 2 + s) * (steps_ + 1) + m;
}

// Takes `choice` for the amounts of memory from `least` on where it is faster: in `fixed` seconds,
// those of `rest` in so much less memory, and those of `inner`, which may be missing.
void ChainProgramme::offer(std::size_t s, std::size_t t, std::size_t least, Choice choice,
                           const Offer& offered) {
  float* const cost = &cost_[index(s, t, 0)];
  Choice* const chosen = &choice_[index(s, t, 0)];
  const auto fixed = static_cast<float>(offered.seconds);
  for (std::size_t m = least; m <= steps_; ++m) {
    float seconds = fixed;
    if (offered.rest != nullptr) seconds += offered.rest[m - offered.kept];
    if (offered.inner != nullptr) seconds += offered.inner[m];
    const bool faster = seconds < cost[m];
    cost[m] = faster ? seconds : cost[m];
    chosen[m] = faster ? choice : chosen[m];
  }
}

void ChainProgramme::solve(std::size_t s, std::size_t t) {
  // A replay has what it makes at hand; so has the block whose backward comes next.
  const bool offloads = t + 1 == blocks_.size() && s < t;
  const std::vector<Way>& ways = sizes_[s].ways;
  for (std::size_t way = 0; way < ways.size(); ++way) {
    if (offloads || !ways[way].outside_only) try_keep(s, t, way);
  }
  std::size_t least = 0;
  for (std::size_t count = 1; s + count <= t; ++count) {
    const std::size_t last = s + count - 1;
    const std::size_t input = last > s ? sizes_[last - 1].output : 0;
    least = std::max(least, later_[t] + sizes_[t].gradient + input + sizes_[last].light);
    try_recompute(s, t, count, least);
  }
}

void ChainProgramme::try_keep(std::size_t s, std::size_t t, std::size_t number) {
  const Way& way = sizes_[s].ways[number];
  const auto choice = static_cast<Choice>(kWays + number);
  const bool ends_replay = s == t && t + 1 < blocks_.size();
  const std::size_t forward = ends_replay ? way.replay : way.forward;
  const std::size_t least =
      std::max(later_[t] + sizes_[t].gradient + forward, later_[s] + way.backward);
  if (s == t) {
    offer(s, t, least, choice, {way.seconds - (ends_replay ? way.tail_seconds : 0)});
    return;
  }
  offer(s, t, std::max(least, way.kept), choice, {way.seconds, row(s + 1, t), way.kept});
}

void ChainProgramme::try_recompute(std::size_t s, std::size_t t, std::size_t count,
                                   std::size_t least) {
  const std::size_t next = s + count;
  const std::size_t output = sizes_[next - 1].output;
  double first_run = 0;
  for (std::size_t i = s; i < next; ++i) first_run += blocks_[i].forward_seconds;
  offer(s, t, std::max(least, output), static_cast<Choice>(count),
        {first_run, row(next, t), output, row(s, next - 1)});
}

double ChainProgramme::seconds(std::size_t m) const {
  return row(0, blocks_.size() - 1)[std::min(m, steps_)];
}

std::optional<Schedule> ChainProgramme::schedule(std::size_t m) const {
  m = std::min(m, steps_);
  const std::size_t last = blocks_.size() - 1;
  if (choice_[index(0, last, m)] == kNone) return std::nullopt;
  return collect(0, last, m);
}

Schedule ChainProgramme::collect(std::size_t s, std::size_t t, std::size_t m) const {
  Schedule schedule;
  while (s <= t) {
    const Choice choice = choice_[index(s, t, m)];
    if (choice >= kWays) {
      const std::size_t way = choice - kWays;
      schedule.push_back(part_of(s, way));
      m -= s == t ? 0 : sizes_[s].ways[way].kept;
      ++s;
    } else {
      const std::size_t next = s + choice;
      schedule.push_back({s, next, collect(s, next - 1, m)});
      m -= sizes_[next - 1].output;
      s = next;
    }
  }
  return schedule;
}

}  // namespace cairn::checkpointing
