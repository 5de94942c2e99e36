// What is legal and mostly a mistake: rank 0 warns of it. Collectives.
#pragma once

#include <string>

#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// A rank's parameters lie on another GPU than its own, or on the CPU though it has one.
void warn_of_devices(const nn::Module& model, const ProcessGroup& group);

/// What stands for a batch; empty where it has no dense data.
std::string digest_of_batch(const Tensor& x);
/// All ranks have the same batch. Empty digests are unknown.
void warn_of_same_batches(const std::string& digest, const ProcessGroup& group);

}  // namespace cairn::parallel
