// The arithmetic of all_reduce: element-wise sum, mean, product, maximum or minimum of several
// arrays, in their order.
#pragma once

#include <cstddef>
#include <vector>

#include "cairn/core/dtype.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// Throws InvalidArgument where there is no such operation on the dtype.
void check_reducible(const char* where, ReduceOp op, DType dtype);

/// out[i] = op over inputs[0][i], inputs[1][i], ... (two inputs or more, n elements each), in this
/// order. Half types are combined in f32 and rounded once. A NaN anywhere gives NaN. `out` may be
/// one of the inputs.
void combine(ReduceOp op, DType dtype, const std::vector<const void*>& inputs, void* out,
             std::size_t n);

}  // namespace cairn::parallel
