// Runs a test's body as several ranks: as processes (real ones, over loopback) or as threads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cairn/parallel/process_group.h"

namespace cairn::test {

struct RankResult {
  int status = 0;  // exit status, 128 + n for signal n
  std::string output;
  double seconds = 0.0;  // until it ended
};

/// Starts this program once for each rank, to run only this test, with the job's environment set;
/// in those processes calls body(rank) and returns nothing. Ranks whose body fails an expectation
/// or throws have status 1. Once a test. Ranks that outlive `seconds` are killed (status 137). The
/// rest of the test runs in the first process only where it is guarded by the result.
std::vector<RankResult> start_ranks(int world_size, const std::function<void(int rank)>& body,
                                    double seconds = 40.0);

/// start_ranks with a process group; every rank must succeed.
void run_ranks(int world_size, const std::function<void(parallel::ProcessGroup&)>& body);

/// The ranks are threads of this process.
void run_threads(int world_size, const std::function<void(parallel::ProcessGroup&)>& body);

/// Stays away from what the other ranks are in until they have given up; 20 s at most.
void wait_until_broken(const parallel::ProcessGroup& group);

/// Short deadlines, so that tests of failures are fast.
parallel::GroupOptions fast_options();

}  // namespace cairn::test
