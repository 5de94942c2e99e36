// A tensor kept for the backward, as it is or as the saved-tensor hooks packed it.
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
  /// Without a graph. `op` is named in errors.
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
