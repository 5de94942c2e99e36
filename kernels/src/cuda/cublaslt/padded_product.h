// Products of halves whose rows do not begin at multiples of 16 bytes, such as logits of 50,257
// words: tensor cores take them at a seventh of their speed (H200, cuBLASLt 13.1), also where the
// rows begin so and only their length is no multiple of 8. They pass through memory whose rows are.
#pragma once

#include <cstdint>
#include <functional>

#include "backend.h"
#include "cairn/kernels/matmul.h"
#include "cuda/queue.h"

namespace cairn::kernels::cuda {

/// When a product gains by that, and how much of it goes at a time.
struct Padding {
  double least_multiplications = 1 << 28;
  std::int64_t least_uses = 128;                      // of each element that is copied
  std::int64_t piece_bytes = std::int64_t{64} << 20;  // of the workspace, about
  std::int64_t piece_unit = 128;                      // rows of a piece: a multiple of it
};

using Multiply = std::function<void(const TensorView& a, const TensorView& b, const TensorView& y,
                                    const MatmulOptions& options)>;

/// y = a b of matrices, some rows of y (or columns, where b's are misaligned) at a time: `multiply`
/// gets each piece with what was misaligned in the workspace, and a sum over k with zeros up to a
/// multiple of 8. False, and nothing done, where the product gains nothing by that.
bool multiply_padded(const Backend& backend, const Queue& queue, const TensorView& a,
                     const TensorView& b, const TensorView& y, const MatmulOptions& options,
                     const Multiply& multiply, const Padding& padding = {});

}  // namespace cairn::kernels::cuda
