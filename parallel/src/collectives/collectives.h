// What a backend does: collectives on checked views, one at a time, in the order of the ledger.
#pragma once

#include <cstdint>

#include "cairn/core/tensor_view.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

class Collectives {
 public:
  virtual ~Collectives() = default;
  /// Before each collective: a fingerprint of its number and description. Data of different
  /// fingerprints never meets.
  virtual void begin(std::uint64_t fingerprint) = 0;
  virtual void all_reduce(const TensorView& x, ReduceOp op) = 0;
  virtual void broadcast(const TensorView& x, int root) = 0;
  virtual void all_gather(const TensorView& x, const TensorView& y) = 0;
  virtual void reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op) = 0;
  /// From any thread: collectives under way end with an error soon, later ones at once.
  virtual void abort() noexcept = 0;
};

}  // namespace cairn::parallel
