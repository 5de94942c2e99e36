// What a forward keeps for its backward, by operation and by module.
//
//   const autograd::SavedBytes kept = autograd::saved_bytes([&] { return model(x); });
//   for (const auto& [module, bytes] : kept.by_module) log::info("{}: {} bytes", module, bytes);
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "cairn/core/tensor.h"

namespace cairn::autograd {

/// Bytes. A storage counts once, whole, for the operation that saves it first; parameters do not
/// count.
struct SavedBytes {
  std::int64_t total = 0;
  /// By OpInfo::name; "" for what no operation saved: the inputs of a recomputed segment.
  std::map<std::string, std::int64_t> by_operation;
  /// By the name of the module whose parameter the operation takes ("block.fc" for
  /// "block.fc.weight"); without parameters, by that of the operation before. "" before the first.
  std::map<std::string, std::int64_t> by_module;
};

/// Runs the forward and counts while its result lives. Saved-tensor hooks inside of the forward
/// (recomputation, offload) come first: what they keep elsewhere is not counted.
SavedBytes saved_bytes(const std::function<Tensor()>& forward);

}  // namespace cairn::autograd
