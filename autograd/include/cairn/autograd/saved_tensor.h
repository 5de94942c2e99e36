// A tensor kept for later, as it is or as the innermost saved-tensor hooks packed it: what
// Context::save keeps, and what code that runs operations again in the backward keeps its inputs
// in, so that hooks around it see them.
#pragma once

#include <any>
#include <cstdint>
#include <memory>

#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/core/tensor.h"

namespace cairn::autograd {

class SavedTensor {
 public:
  explicit SavedTensor(const Tensor& tensor);
  /// Without a graph. Throws core::Error naming `op` where it was written in place since, or a hook
  /// returns another shape or dtype.
  Tensor unpack(const char* op) const;

 private:
  struct Packed {
    std::any value;
    std::shared_ptr<const SavedTensorHooks> hooks;
    Shape shape;
    DType dtype;
  };
  Tensor tensor_;  // detached: a saved output must not own its node, nor a chain of inputs its past
  std::uint64_t version_ = 0;
  std::unique_ptr<Packed> packed_;
};

/// A leaf that wants a gradient: a parameter.
bool is_parameter(const Tensor& tensor);

}  // namespace cairn::autograd
