#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <optional>
#include <thread>

#include "cairn/core/error.h"
#include "open_metrics.h"

namespace cairn::observe {

namespace {

using nlohmann::json;
using Point = RankState::Point;

constexpr std::size_t kMostRankPoints = 100;

/// Of one value or more.
double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// A point a bucket.
std::vector<Point> points_of(const History& history) {
  const Curve *steps = history.find(kStepSeconds), *waits = history.find(kWaitSeconds);
  std::vector<Point> points;
  if (steps == nullptr) return points;
  std::size_t at = 0;
  for (const Bucket& step : steps->buckets) {
    const std::int64_t last = (step.key + 1) * history.width() - 1;
    Point point{.step = std::min(last, history.last_step()), .own = step.mean()};
    while (waits != nullptr && at < waits->buckets.size() && waits->buckets[at].key < step.key)
      ++at;
    if (waits != nullptr && at < waits->buckets.size() && waits->buckets[at].key == step.key) {
      point.wait = waits->buckets[at].mean();
      point.own = std::max(0.0, point.own - point.wait);
    }
    points.push_back(point);
  }
  return points;
}

double typical(const std::vector<Point>& points, double Point::*time) {
  std::vector<double> times;
  for (std::size_t i = points.size() / 2; i < points.size(); ++i) times.push_back(points[i].*time);
  if (times.empty()) return 0;
  std::sort(times.begin(), times.end());
  times.resize(times.size() - times.size() / 20);
  return std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
}

/// Means of as many neighbours as leave few enough.
std::vector<Point> thinned(const std::vector<Point>& points) {
  const std::size_t each = (points.size() + kMostRankPoints - 1) / kMostRankPoints;
  std::vector<Point> few;
  for (std::size_t i = 0; i < points.size(); i += each) {
    const std::size_t end = std::min(points.size(), i + each);
    Point mean{.step = points[end - 1].step};
    for (std::size_t k = i; k < end; ++k) {
      mean.own += points[k].own / static_cast<double>(end - i);
      mean.wait += points[k].wait / static_cast<double>(end - i);
    }
    few.push_back(mean);
  }
  return few;
}

RankState from_json(const json& text) {
  RankState state{.rank = text.at("rank").get<int>(),
                  .where = text.at("where").get<std::string>(),
                  .running = text.at("running").get<bool>(),
                  .renewed = text.at("renewed").get<double>(),
                  .step = text.at("step").get<std::int64_t>(),
                  .memory = text.at("memory").get<double>(),
                  .own = text.at("own").get<double>(),
                  .wait = text.at("wait").get<double>(),
                  .points = {}};
  for (const json& point : text.at("points"))
    state.points.push_back(
        {point.at(0).get<std::int64_t>(), point.at(1).get<double>(), point.at(2).get<double>()});
  return state;
}

std::optional<RankState> read_rank(const std::string& folder, int rank) {
  std::ifstream file(rank_file(core::str(folder, "/rank-", rank)));
  try {
    if (file) return from_json(json::parse(file));
  } catch (const json::exception&) {  // of another program
  }
  return std::nullopt;
}

}  // namespace

RankState rank_state(const History& history, const RunFacts& facts) {
  const std::vector<Point> points = points_of(history);
  const Curve* memory = history.find(kMemoryPeak);
  return {.rank = facts.rank,
          .where = facts.where,
          .running = facts.running,
          .renewed = facts.renewed,
          .step = history.last_step(),
          .memory = memory == nullptr ? 0 : memory->last,
          .own = typical(points, &Point::own),
          .wait = typical(points, &Point::wait),
          .points = thinned(points)};
}

json to_json(const RankState& state) {
  json points = json::array();
  for (const Point& point : state.points) points.push_back({point.step, point.own, point.wait});
  return {{"rank", state.rank},       {"where", state.where}, {"running", state.running},
          {"renewed", state.renewed}, {"step", state.step},   {"memory", state.memory},
          {"own", state.own},         {"wait", state.wait},   {"points", points}};
}

std::string rank_file(const std::string& folder) {
  return folder + "/rank.json";
}

std::vector<RankState> read_ranks(const std::string& folder, int ranks) {
  std::vector<RankState> all;
  for (int rank = 1; rank < ranks; ++rank) {
    if (auto state = read_rank(folder, rank)) all.push_back(std::move(*state));
  }
  return all;
}

void wait_for_ranks_to_end(const std::string& folder, int ranks) {
  constexpr auto kPause = std::chrono::milliseconds(20);
  for (int turn = 0; turn < 50; ++turn) {
    const std::vector<RankState> all = read_ranks(folder, ranks);
    const auto ended = [](const RankState& state) { return !state.running; };
    if (std::all_of(all.begin(), all.end(), ended)) return;
    std::this_thread::sleep_for(kPause);
  }
}

double own_of_others(const std::vector<RankState>& ranks, const RankState& rank) {
  std::vector<double> own;
  for (const RankState& state : ranks) {
    if (state.rank != rank.rank) own.push_back(state.own);
  }
  return median(std::move(own));
}

const RankState* slowest(const std::vector<RankState>& ranks) {
  if (ranks.size() < 2) return nullptr;
  const auto [last, first] = std::minmax_element(
      ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  if (10 * last->step < 9 * first->step) return nullptr;
  const auto most = std::max_element(ranks.begin(), ranks.end(),
                                     [](const auto& a, const auto& b) { return a.own < b.own; });
  return most->own > 1.1 * own_of_others(ranks, *most) ? &*most : nullptr;
}

}  // namespace cairn::observe
