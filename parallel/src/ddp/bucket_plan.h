// Which slices of the gradient arena are reduced together, and in which order.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cairn/optim/arena.h"
#include "cairn/parallel/distributed.h"

namespace cairn::parallel {

struct PlannedBucket {
  std::size_t buffer = 0;      // of the arena
  std::size_t first_slot = 0;  // of the buffer
  std::size_t last_slot = 0;   // one behind
  TensorView gradients;        // the slots and the gaps between them
  std::string name;            // for errors: "gradients fc.bias ... fc.weight"
};

/// Buckets of neighbouring slots of these parameters, each as large as the caps allow, in the order in which a backward
/// pass completes them (reverse registration): the same on every rank, whatever the ranks' timing.
std::vector<PlannedBucket> plan_buckets(const optim::GradientArena& arena,
                                        const NamedTensors& parameters,
                                        const DistributedOptions& options);

}  // namespace cairn::parallel
