// How NCCL reduces: along a ring, in the tensor's dtype.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <string>
#include <vector>

namespace cairn::gpusim {

/// Bytes of an element; 0 for a dtype that the simulator does not know.
std::size_t nccl_size(ncclDataType_t type);
std::string nccl_name(ncclDataType_t type);  // "f32"
std::string nccl_name(ncclRedOp_t op);       // "sum"

/// Elements [begin, end) of out = op over the ranks' inputs, added up rank by rank from `first` on
/// and rounded to the dtype each time. Averages of floating dtypes multiply each input by 1 / n
/// first, those of integers divide the sum.
void nccl_combine(const std::vector<const void*>& inputs, void* out, std::size_t begin,
                  std::size_t end, int first, ncclDataType_t type, ncclRedOp_t op);

/// All `count` elements as a ring does it: one chunk a rank, chunk c summed from rank c + 1 on.
void nccl_ring(const std::vector<const void*>& inputs, void* out, std::size_t count,
               ncclDataType_t type, ncclRedOp_t op);

}  // namespace cairn::gpusim
