// What simulated GPUs do that others seldom do: the order of what nothing orders, and refusals.
#pragma once

namespace cairn::test {

/// One of three schedules with a seed of its own (gpu/sim/simulator.h); 0: as late as can be.
/// Nothing on other GPUs.
void set_gpu_schedule(int drawn);

/// The nth call of that name from now on fails; null: none does. Nothing on other GPUs.
void refuse_gpu_call(const char* call, int nth);

}  // namespace cairn::test
