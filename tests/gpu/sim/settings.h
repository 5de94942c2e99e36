// What the environment says of the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/sim/simulator.h"

namespace cairn::gpusim {

struct Fault;

struct Settings {
  int gpus = 1;
  std::size_t memory = std::size_t{2} << 30;
  std::size_t shared = std::size_t{163} << 10;  // of a block
  int capability = 90;                          // of the GPUs, times ten
  bool peers = true;
  Schedule schedule = Schedule::late;
  std::uint64_t seed = 1;
  std::vector<Fault> faults;
};

/// Reports and aborts where a variable cannot be read.
Settings settings_from_environment();

}  // namespace cairn::gpusim
