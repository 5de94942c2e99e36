#include "advice.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "cairn/core/error.h"
#include "number.h"

namespace cairn::observe {

namespace {

constexpr std::int64_t kFewSteps = 20;
constexpr std::size_t kMost = 3;
constexpr double kLeastGain = 0.03;

struct Hint {
  double gain = 0;  // share of the time
  std::string text;
};
using Hints = std::vector<Hint>;

std::string percent(double share) {
  return fixed(100 * share, 0) + " %";
}
std::string milliseconds(double seconds) {
  return short_number(std::round(1e4 * seconds) / 10) + " ms";
}

/// Of all that a run told, without what the first step had to make.
class Shares {
 public:
  explicit Shares(const History& history) : history_(history), all_(sum(kStepSeconds)) {}
  double of(const std::string& part) const {
    return all_ > 0 ? sum(core::str(kSeconds, part)) / all_ : 0;
  }

 private:
  double sum(std::string_view name) const {
    const Curve* curve = history_.find(name);
    double seconds = 0;
    for (std::size_t i = 1; curve != nullptr && i < curve->buckets.size(); ++i)
      seconds += curve->buckets[i].sum;
    return seconds;
  }
  const History& history_;
  double all_;
};

// What a loader needs for a batch hides behind what computes one once more threads share it.
void data(Hints& hints, const Shares& shares) {
  const double waits = shares.of("data");
  if (waits >= 1) return;
  const double times = std::max(2.0, std::ceil(1 / (1 - waits) - 1e-9));
  hints.push_back({waits, core::str("data: ", percent(waits), " of the step waits for batches; ",
                                    times, " times as many loader threads would hide it")});
}

void slow_rank(Hints& hints, const std::vector<RankState>& ranks) {
  const RankState* slow = slowest(ranks);
  if (slow == nullptr) return;
  const double others = own_of_others(ranks, *slow);
  const double gain = (slow->own - others) / (slow->own + slow->wait);
  hints.push_back(
      {gain,
       core::str("ranks: rank ", slow->rank, " (", slow->where, ") takes ", milliseconds(slow->own),
                 " of its own a step, the others ", milliseconds(others),
                 "; as fast as they, it would save every rank ", percent(gain), " of a step")});
}

/// Of a step's time what waiting takes that no slower rank causes.
double exchange_share(const std::vector<RankState>& ranks) {
  const auto least = std::min_element(ranks.begin(), ranks.end(),
                                      [](const auto& a, const auto& b) { return a.wait < b.wait; });
  const double step = least->own + least->wait;
  return step > 0 ? least->wait / step : 0;
}

// What a step costs whatever its batch: divided among more samples where memory has room for them,
// else among micro-batches.
void fixed_costs(Hints& hints, const History& history, const Shares& shares,
                 const RunFacts& facts) {
  const bool ranks = facts.side_by_side.size() > 1;
  const double exchange = ranks ? exchange_share(facts.side_by_side) : 0;
  const double constant = exchange + shares.of("update");
  const Curve* peak = history.find(kMemoryPeak);
  const bool known = peak != nullptr && peak->last > 0;
  const double room = known ? std::floor(0.9 * facts.memory_limit / peak->last) : 0;
  const double times = std::clamp(room, 2.0, 8.0), gain = constant * (1 - 1 / times);
  const std::string way =
      room >= 2 ? core::str("memory has room for one ", times, " times as large, which would save ")
                : "two micro-batches a step would save ";
  hints.push_back(
      {gain, core::str("batch: ", percent(constant), " of a step, the update",
                       ranks ? " and what ranks exchange" : "", ", costs the same for any batch; ",
                       way, percent(gain), " a sample")});
}

void saves(Hints& hints, const History& history, const Shares& shares) {
  const double saving = shares.of("save");
  if (history.events(EventKind::checkpoint) == 0) return;
  hints.push_back({saving / 2, core::str("save: ", percent(saving), " of the time goes to saves; ",
                                         "half as many would give back ", percent(saving / 2))});
}

// Of the later half: a scale that is too high at the start is found in a few steps.
void skips(Hints& hints, const History& history) {
  const std::int64_t half = history.last_step() / 2;
  std::map<std::string, int> times;
  int all = 0;
  for (const EventRecord& event : history.events()) {
    if (event.kind != EventKind::skip || event.step <= half) continue;
    ++all;
    ++times[event.culprit];
  }
  if (all == 0) return;
  const auto most = std::max_element(
      times.begin(), times.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const double share = static_cast<double>(all) / static_cast<double>(history.last_step() - half);
  const std::string whose = most->first.empty() ? "" : core::str(", most for ", most->first);
  hints.push_back({share, core::str("loss scale: ", percent(share), " of the last ",
                                    history.last_step() - half, " steps were skipped", whose,
                                    "; bf16, or f32 where it overflows, would give them back")});
}

}  // namespace

std::vector<std::string> advice(const History& history, const RunFacts& facts) {
  if (history.last_step() < kFewSteps) return {};
  const Shares shares(history);
  Hints hints;
  data(hints, shares);
  slow_rank(hints, facts.side_by_side);
  fixed_costs(hints, history, shares, facts);
  saves(hints, history, shares);
  skips(hints, history);
  std::erase_if(hints, [](const Hint& hint) { return hint.gain < kLeastGain; });
  std::stable_sort(hints.begin(), hints.end(),
                   [](const Hint& a, const Hint& b) { return a.gain > b.gain; });
  if (hints.size() > kMost) hints.resize(kMost);
  std::vector<std::string> sentences;
  for (Hint& hint : hints) sentences.push_back(std::move(hint.text));
  return sentences;
}

}  // namespace cairn::observe
