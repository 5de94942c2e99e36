#include "simt/emulator.h"

namespace cairn::simt {

void submit(const Launch& shape, Kernel kernel) {
  ++launch_count();
  Machine::current().run(shape, kernel);
}

}  // namespace cairn::simt
