// Hashes of tensors, to compare them across ranks and files.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// A 64-bit hash of each tensor's bytes in memory order, any dtype. Equal bits give equal hashes on
/// every device and at every address; different ones do so with probability 2^-64 (no defence
/// against bytes chosen to collide). The host waits once.
std::vector<std::uint64_t> hash_tensors(const std::vector<TensorView>& tensors);

}  // namespace cairn::kernels
