// Gradients of losses with different scales in one step: before a backward of another contribution
// writes, what lies in the slots is moved, unscaled, into f32 sums beside them, and checked in the
// same pass. This is the only place that moves a gradient into a sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::gradients {

/// What the passes over some tensors' gradients found, by tensor.
struct Check {
  struct Of {
    const void* tensor = nullptr;  // Tensor::id(): its slot holds the contribution
    std::uint64_t clears = 0;      // the slot's: another clear() drops what was found
  };
  std::vector<Of> tensors;
  kernels::PendingCheck found;
};

/// The backwards of one loss at one scale, with the checks of those of its gradients that were
/// moved.
class CheckedContribution : public core::Contribution {
 public:
  std::vector<Check> checks;  // launched, not read
};

/// A pass over gradients of some of the tensors that stash() was given.
struct StashPass {
  std::vector<std::size_t> tensors;  // by index
  kernels::PendingCheck check;       // 2-norms, of the gradients as they lay
};

/// Moves what the slots of `tensors` hold, divided by its scale and times `scale`, into f32 sums
/// beside them (adds to what is there) and leaves the slots empty. One pass for each device and
/// contribution, which is told of its check. Tensors without a gradient, or frozen, are left alone.
/// A sum's memory is made at its first use. Where a device fails, the gradients that it may have
/// added are broken.
std::vector<StashPass> stash(const std::vector<Tensor>& tensors, double scale = 1.0);

/// A backward begins that may write these leaves: stashes what other contributions of its scaler
/// left in their slots and in those of their arenas (all of an arena: ranks whose losses reach
/// different parameters do alike), puts what plain backwards left there down to this one, lets
/// arenas lay out their slots, and begins the slots. Throws as core::GradientSlot::begin().
void begin_run(core::RunId run, const core::GradientScale& scale,
               const std::vector<Tensor>& leaves);

}  // namespace cairn::gradients
