// A process's place in its job, as its launcher tells it.
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
  int gpu = -1;       // its index; -1: that of the local rank
};

/// Reads the variables of the first launcher that has set its own (docs/parallel.md has the table):
/// RANK and WORLD_SIZE as cairn-run, torchrun and a PyTorchJob set them, Open MPI's, MPICH's, those
/// of a Slurm step. None is a job of one process. MASTER_ADDR and MASTER_PORT may be missing for
/// the last three where all ranks are on this machine; Slurm names rank 0's machine too. The port
/// is CAIRN_STORE_PORT where that is set; under torchrun, whose own store has MASTER_PORT, it is
/// made of MASTER_PORT and TORCHELASTIC_RUN_ID. Throws InvalidArgument naming the variable and its
/// value.
///
/// CAIRN_JOB_TOKEN is read once: it is wiped from the environment, where programs that this process
/// starts would find it, and kept in memory for the groups that come later. Call while no other
/// thread reads or writes the environment.
JobEnvironment read_job_environment();

/// The first host of a Slurm node list: "gpu003" of "gpu[003-005,9],login1".
std::string first_host(const std::string& node_list);

}  // namespace cairn::parallel
