// Dropout. The rules of elementwise.h hold.
#pragma once

#include <cstdint>

#include "cairn/core/generator.h"
#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// y = x * mask / (1 - p), where element i (row-major) is kept iff uniform(philox(seed, offset, i /
/// 4)[i % 4]) >= p. The backward is the same call on dy: no mask is stored. y may be x.
void dropout(const TensorView& x, double p, std::uint64_t seed, std::uint64_t offset,
             const TensorView& y);
/// The same with the numbers of a draw (Generator::draw): what a captured step repeats with new
/// ones.
void dropout(const TensorView& x, double p, const core::RandomDraw& draw, const TensorView& y);

}  // namespace cairn::kernels
