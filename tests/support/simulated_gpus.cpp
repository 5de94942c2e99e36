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

void refuse_gpu_call([[maybe_unused]] const char* call, [[maybe_unused]] int nth) {
#ifdef CAIRN_SIMULATED_GPUS
  gpusim::clear_injected();
  if (call != nullptr) gpusim::inject(call, static_cast<std::uint64_t>(nth), 1);
#endif
}

}  // namespace cairn::test
