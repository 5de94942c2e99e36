// What libtorch's side writes while gradients wait for their step: a clip of scaled gradients, the step of a
// torch::optim optimizer left in the loop. Version counters do not tell: both write through Tensor::data().
// So the first elements of each weight and gradient are hashed when a backward has ended, and compared when
// the next one or a step begins.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::libtorch {

class SharedWrites {
 public:
  struct Parameter {
    std::string name;
    Tensor weight;
    Tensor gradient;
    double factor = 1.0;  // by which it is multiplied
  };

  /// These wait for a step, as they are now.
  void remember(const std::vector<Parameter>& waiting);
  /// Throws InvalidArgument, naming it, for a weight that was written since, and for a gradient that is
  /// multiplied by a loss scale (unless it was set to zero).
  void check(const std::vector<Parameter>& waiting) const;

 private:
  struct Hashes {
    std::uint64_t weight = 0, gradient = 0;
  };
  static std::vector<Hashes> hashes_of(const std::vector<Parameter>& waiting);

  std::unordered_map<std::string, Hashes> known_;
};

}  // namespace cairn::libtorch
