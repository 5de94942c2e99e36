// The environment each process of a job is started with: torchrun's contract plus the job's token.
#pragma once

#include <string>
#include <vector>

#include "options.h"

namespace cairn::run {

/// What all processes of this job on this machine share.
struct Job {
  Options options;
  int port = 0;
  std::string token;   // secret that lets a process into the job's store
  std::string run_id;  // marks every process of this cairn-run, so that none outlives it
  int threads = 1;     // OMP_NUM_THREADS where the environment does not set it
};

/// Finds a port, a token and a share of the cores. Throws std::runtime_error where the port that
/// was asked for is in use, and names it.
Job prepare_job(const Options& options);

/// Makes this process's environment, with the job's variables set, as "NAME=value" entries.
std::vector<std::string> environment_of(const Job& job, int local_rank);

}  // namespace cairn::run
