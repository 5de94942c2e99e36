// metrics.prom: OpenMetrics 1.0 text.
#pragma once

#include <cstdint>
#include <string>

#include "history.h"
#include "ranks.h"

namespace cairn::observe {

/// What is said of a run beside its history.
struct RunFacts {
  std::string name;  // of the folder
  int rank = 0, ranks = 1;
  bool running = true;
  double started = 0, renewed = 0;  // seconds since 1970
  double renew_seconds = 0;
  double restarts = 0;  // of the processes, by cairn-run
  std::uint64_t dropped = 0, unwritten = 0;
  std::string failures;
  std::vector<std::pair<std::string, std::string>> about;
  std::string where;                      // "host, process 77"
  double memory_limit = 0;                // bytes that tensors may take; 0: nobody knows
  std::vector<RankState> side_by_side{};  // this rank; on the first one's page all that have told
};

std::string open_metrics(const History& history, const RunFacts& facts);

}  // namespace cairn::observe
