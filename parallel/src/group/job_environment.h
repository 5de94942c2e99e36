// A process's place in its job, as cairn-run, torchrun or a hand-written start tell it.
#pragma once

#include <string>

namespace cairn::parallel {

struct JobEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the processes of this machine; RANK where LOCAL_RANK is not set
  int local_world_size = 1;  // WORLD_SIZE where LOCAL_WORLD_SIZE is not set
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::string token;  // empty: the job has none
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
/// CAIRN_JOB_TOKEN. None of them set is a job of one process. Throws InvalidArgument naming the
/// variable and its value.
JobEnvironment read_job_environment();

}  // namespace cairn::parallel
