#include "support/gpu_faults.h"
#include "support/gpu_schedule.h"
#include "support/tensors.h"
#ifdef CAIRN_SIMULATED_GPUS
#include "gpu/sim/simulator.h"
#endif

namespace cairn::test {

bool gpus_are_simulated() {
#ifdef CAIRN_SIMULATED_GPUS
  return true;
#else
  return false;
#endif
}

void set_gpu_schedule([[maybe_unused]] int drawn) {
#ifdef CAIRN_SIMULATED_GPUS
  gpusim::set_schedule(static_cast<gpusim::Schedule>(drawn % 3), static_cast<std::uint64_t>(drawn));
#endif
}

GpuFault::GpuFault([[maybe_unused]] const std::string& call, [[maybe_unused]] std::uint64_t nth,
                   [[maybe_unused]] int code) {
#ifdef CAIRN_SIMULATED_GPUS
  gpusim::inject(call, nth, code);
#endif
}

GpuFault::~GpuFault() {
#ifdef CAIRN_SIMULATED_GPUS
  gpusim::clear_injected();
#endif
}

}  // namespace cairn::test
