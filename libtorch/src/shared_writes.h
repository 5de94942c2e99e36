// What libtorch's side writes while gradients wait for their step: a clip of scaled gradients, the
// step of a torch::optim optimizer left in the loop. Both write through Tensor::data(), of which
// version counters do not tell: the first elements of each weight and gradient are hashed when a
// backward has ended, and compared when the next one or a step begins. Other writes to a gradient
// are told by its version.
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
    double factor = 1.0;       // by which it is multiplied
    bool in_parts = false;     // another one lies in a sum that .grad does not show
    bool divided = false;      // it is this rank's part of it, and .grad has no elements
    std::int64_t version = 0;  // libtorch's, of the gradient
  };

  /// These wait for a step, as they are now.
  void remember(const std::vector<Parameter>& waiting);
  /// A step is over: what it has left may be written.
  void forget() { known_.clear(); }
  /// Throws InvalidArgument, naming it, for a weight that was written since, for a gradient that is
  /// multiplied by a loss scale (unless it was set to zero), for one in parts, and for one that
  /// ranks divide.
  void check(const std::vector<Parameter>& waiting) const;

 private:
  struct Looks {
    std::uint64_t weight = 0, gradient = 0;  // hashes
    std::int64_t version = 0;
  };
  static std::vector<Looks> looks_of(const std::vector<Parameter>& waiting);

  std::unordered_map<std::string, Looks> known_;
};

}  // namespace cairn::libtorch
