// The environment each process of a job is started with: torchrun's contract plus the job's token.
#pragma once

#include <string>
#include <vector>

#include "options.h"

namespace cairn::run {

/// What all processes of this job on this machine share.
struct LaunchedJob {
  Options options;
  int port = 0;
  std::string token;  // secret that lets a process into the job's store
  std::string id;     // CAIRN_RUN_ID begins with it: marks the processes, so that none outlives it
  std::string saving_folder;  // where ranks that save leave a mark; empty: nowhere
  int restarts = 0;
  int threads = 1;  // OMP_NUM_THREADS where the environment does not set it
};

/// Finds a port, a token and a share of the cores. Throws std::runtime_error where the port that
/// was asked for is in use, and names it.
LaunchedJob prepare_job(const Options& options);

/// Makes the next incarnation: one restart more, and another port where none was asked for.
void renew(LaunchedJob& job);

/// Makes this process's environment, with the job's variables set, as "NAME=value" entries. After a
/// restart the run's id is another one: the ranks tell the others that they take the places of
/// those before.
std::vector<std::string> environment_of(const LaunchedJob& job, int local_rank);

}  // namespace cairn::run
