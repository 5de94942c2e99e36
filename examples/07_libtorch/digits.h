// Drawn digits as libtorch's tensors.
#pragma once

#include <torch/types.h>

#include "cairn/data/drawn_digits.h"
#include "cairn/libtorch/tensors.h"

namespace digits {

struct Batch {
  torch::Tensor images, labels;  // [N, 1, 28, 28] f32 in [-1, 1], [N] i64
};

/// Batch i of this size; images of a seed do not repeat.
class Batches {
 public:
  Batches(std::uint64_t seed, std::int64_t count)
      : drawn_(seed, count),
        images_(cairn::libtorch::to_torch(drawn_.images()).unsqueeze(1).to(torch::kFloat)),
        labels_(cairn::libtorch::to_torch(drawn_.labels())) {
    images_.div_(127.5).sub_(1.0);
  }
  Batch batch(std::int64_t i, std::int64_t size) const {
    const std::int64_t first = i * size % (images_.size(0) - size + 1);
    return {images_.slice(0, first, first + size), labels_.slice(0, first, first + size)};
  }

 private:
  cairn::data::DrawnDigits drawn_;
  torch::Tensor images_, labels_;
};

}  // namespace digits
