// DrawnDigits: a built-in set of handwritten-looking digits in MNIST's shape, so that a first
// training needs no download.
//
// Each image is drawn from a stroke outline (several styles a digit) with random stretch, slant,
// rotation, wobble, thickness and softness, scaled to a box of 20 x 20 pixels and centred by mass
// at pixel (14, 14), as MNIST's digits are. Image i of a seed depends on nothing but (seed, i): the
// same bits on every machine, with any number of threads, and in a set of any size.
//
//   data::DrawnDigits train(1, 12000), test(2, 2000);
//
// The tutorials' ConvNet trained on 12,000 of them reads 99.8 % of unseen drawn digits and 92 % of
// MNIST's test images.
#pragma once

#include <cstdint>

#include "cairn/data/dataset.h"

namespace cairn::data {

class DrawnDigits : public TensorDataset {
 public:
  /// Draws images 0 ... count-1 of the seed, on core::num_threads() threads. Throws InvalidArgument
  /// for a negative count.
  DrawnDigits(std::uint64_t seed, std::int64_t count);

  /// [count, 28, 28] u8, from 0 for paper to 255 for ink; labels() are [count] i64 in 0-9. The
  /// input of a sample is [1, 28, 28].
  Tensor images() const;
};

}  // namespace cairn::data
