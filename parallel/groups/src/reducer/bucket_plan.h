// Which gradients are reduced together, and in which order.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cairn/parallel/reducer.h"

namespace cairn::parallel {

struct Gradient {
  std::string name;
  TensorView view;
  std::size_t expected = 0;  // its place in the order in which gradients become ready
  // Neighbours in memory are a run.
  std::size_t run = 0;      // the place of its first one
  std::int64_t offset = 0;  // bytes from there
};

/// Sets run and offset: gradients of one dtype and device with at most gap_bytes between them are
/// neighbours.
void find_runs(std::vector<Gradient>& gradients, std::int64_t gap_bytes);

struct PlannedBucket {
  std::vector<std::size_t> gradients;  // places in the list
  TensorView slice;  // neighbours in memory and the gaps between them; undefined: scattered
  std::string name;  // for errors: "gradients fc.bias ... fc.weight"
};

/// Buckets as large as the options allow, in the order in which their last gradients are expected.
/// Runs are cut into slices; gradients without a neighbour share buckets. Looks at runs and
/// offsets, not at addresses: the same on every rank where those are.
std::vector<PlannedBucket> plan_buckets(const std::vector<Gradient>& gradients,
                                        const ReducerOptions& options);

}  // namespace cairn::parallel
