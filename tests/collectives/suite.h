// Every collective of a group against a naive reference in double, for all dtypes and awkward
// sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"

namespace cairn::test {

/// Small whole numbers, whose sums and products are exact in every dtype; `salt` tells calls apart.
Tensor pattern(int rank, std::int64_t n, DType dtype, int salt = 0);
/// op over all ranks' patterns of n elements.
std::vector<double> reduced(int world, std::int64_t n, DType dtype, parallel::ReduceOp op,
                            int salt = 0);

/// All of the below. Every rank calls it.
void check_collectives(const parallel::ProcessGroup& group);
void check_reductions(const parallel::ProcessGroup& group, std::int64_t n, DType dtype);
void check_movements(const parallel::ProcessGroup& group, std::int64_t n, DType dtype);
void check_uneven(const parallel::ProcessGroup& group, std::int64_t n, DType dtype);
void check_pairs(const parallel::ProcessGroup& group);

}  // namespace cairn::test
