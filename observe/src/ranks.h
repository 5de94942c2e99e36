// The ranks of a job side by side: each writes its state into its folder's rank.json, and the first
// one's page has all of them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "history.h"

namespace cairn::observe {

struct RunFacts;

struct RankState {
  /// Seconds a step, means of the steps up to this one: of the rank's own, and of waiting for
  /// others.
  struct Point {
    std::int64_t step = 0;
    double own = 0, wait = 0;
  };
  int rank = 0;
  std::string where;  // "host, process 77"
  bool running = true;
  double renewed = 0;  // seconds since 1970
  std::int64_t step = 0;
  double memory = 0;         // bytes, the peak
  double own = 0, wait = 0;  // means of the later half, without the largest twentieth
  std::vector<Point> points;
};

RankState rank_state(const History& history, const RunFacts& facts);
nlohmann::json to_json(const RankState& state);

/// Where a rank's state stands.
std::string rank_file(const std::string& folder);
/// Those of the job's other ranks, by rising rank; not of one whose file is none.
std::vector<RankState> read_ranks(const std::string& folder, int ranks);
/// Returns when every other rank has ended, or after a second.
void wait_for_ranks_to_end(const std::string& folder, int ranks);

/// The rank with the most time of its own, where it has a tenth more than the median of the
/// others; null: none has, or what one told is of much earlier steps.
const RankState* slowest(const std::vector<RankState>& ranks);
/// The median of the others' own times. Needs another.
double own_of_others(const std::vector<RankState>& ranks, const RankState& rank);

}  // namespace cairn::observe
