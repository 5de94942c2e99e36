// The start of a job whose ranks have a communicator of NCCL's instead of a launcher's variables.
#pragma once

#include <chrono>
#include <memory>

#include "group/job_environment.h"
#include "store/store.h"

struct ncclComm;

namespace cairn::parallel {

struct Meeting {
  JobEnvironment job;
  std::unique_ptr<StoreServer> server;  // in rank 0
};

/// Throws as ProcessGroup::from_nccl.
Meeting meet_over_nccl(ncclComm* communicator, std::chrono::milliseconds timeout);

}  // namespace cairn::parallel
