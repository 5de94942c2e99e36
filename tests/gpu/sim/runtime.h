// What the files of the CUDA runtime's entry points share.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/sim/machine.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {

inline Machine& machine() {
  return Machine::get();
}

/// Errors stay until they are asked for; those of a lost device come back at every call.
cudaError_t answer(int code);

/// What every call does before its own work: an injected error, or a lost device's.
cudaError_t enter(const Call& call);

/// The device is made ready for work.
void touch_context(int device);

Stream* find_stream_of(cudaStream_t handle);

}  // namespace cairn::gpusim
