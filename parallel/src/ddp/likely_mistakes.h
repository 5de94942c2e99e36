// What is legal and mostly a mistake: rank 0 warns of it. Collectives.
#pragma once

#include <string>

#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// A rank's parameters lie on another GPU than its own, or on the CPU though it has one.
void warn_of_devices(const nn::Module& model, const ProcessGroup& group);

/// All ranks were given the same first batch.
class FirstBatch {
 public:
  void see(const Tensor& x);
  /// A collective in the first call, which warns.
  void warn_once_of_same(const ProcessGroup& group);

 private:
  std::string digest_;  // empty: none was seen, or it has no dense data
  bool compared_ = false;
};

}  // namespace cairn::parallel
