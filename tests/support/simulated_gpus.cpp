#include "support/tensors.h"

namespace cairn::test {

bool gpus_are_simulated() {
#ifdef CAIRN_SIMULATED_GPUS
  return true;
#else
  return false;
#endif
}

}  // namespace cairn::test
