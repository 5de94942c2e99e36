// What the chunks of a list found, added up per tensor.
#pragma once

#include <span>
#include <vector>

#include "cpu/chunks.h"
#include "power_sum.h"

namespace cairn::kernels::cpu {

/// In the chunks' order.
inline void join_chunks(const std::vector<Chunk>& chunks, const std::vector<CheckPart>& parts,
                        const PowerSum& power, std::span<TensorCheck> checks) {
  const JoinParts join{power};
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
