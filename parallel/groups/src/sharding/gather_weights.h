// Weights of which each rank has a part.
#pragma once

#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// What one rank puts into a gather, and gets.
struct PartAndWhole {
  std::string name;
  TensorView part;                   // this rank's, [n]; may be its place in the whole
  TensorView whole;                  // dense
  std::vector<std::int64_t> counts;  // elements of each rank
};

/// The parts of weights that every rank keeps whole.
std::vector<PartAndWhole> parts_in_place(const std::vector<Tensor>& weights,
                                         const ProcessGroup& group);

/// Gives every rank all parts: large tensors where they lie, small ones in flat buffers of up to 25
/// MiB, one dtype and device each. A collective: every rank hands in the same tensors. Done in the
/// current streams' order; nobody is told that the wholes were written.
void gather_parts(const std::vector<PartAndWhole>& tensors, const ProcessGroup& group);

}  // namespace cairn::parallel
