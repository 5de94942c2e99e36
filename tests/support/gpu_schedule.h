// In which order simulated GPUs do what nothing orders.
#pragma once

namespace cairn::test {

/// One of three schedules with a seed of its own (gpu/sim/simulator.h); 0: as late as can be.
/// Nothing on other GPUs.
void set_gpu_schedule(int drawn);

}  // namespace cairn::test
