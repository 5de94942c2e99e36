// Checks of parts of a list's tensors, and what they add up to.
#pragma once

#include <span>
#include <vector>

#include "cpu/chunks.h"
#include "math/power_sum.h"

namespace cairn::kernels::cpu {

/// Of n contiguous elements of f16, bf16 or f32.
CheckPart check_run(DType dtype, const void* x, std::int64_t n, const PowerSum& power);

/// Per tensor, in the chunks' order.
inline void join_chunks(const std::vector<Chunk>& chunks, const std::vector<CheckPart>& parts,
                        const PowerSum& power, std::span<TensorCheck> checks) {
  const JoinParts<PowerSum> join{power};
  std::vector<CheckPart> totals(checks.size(), CheckPart{0.0, 0, 0});
  for (std::size_t k = 0; k < chunks.size(); ++k) {
    CheckPart& total = totals[chunks[k].tensor];
    total = join(total, parts[k]);
  }
  for (std::size_t i = 0; i < checks.size(); ++i) {
    checks[i] = {totals[i].power_sum, totals[i].nonfinite, totals[i].nan};
  }
}

}  // namespace cairn::kernels::cpu
