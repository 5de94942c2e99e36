// Activation recomputation and offload for libtorch's own graphs.
//
//   torch::Tensor y =
//       libtorch::checkpoint([&](const torch::Tensor& x) { return block->forward(x); }, x);
//
//   checkpointing::Offload offload;
//   {
//     const libtorch::SavedTensorHooksGuard hooks(offload.hooks());
//     loss = torch::nll_loss(net->forward(x), y);
//   }
//
// There is one graph: hooks of parameters fire once, so both go with data parallel training.
// Gradients are the same bits as without. A replay runs under the first run's autocast and random
// numbers and leaves the generators where they stood; what the first run wrote beside its results
// (running statistics, counters) is written once. It ends with the last tensor that the backward
// needs.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <utility>

#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/libtorch/nested.h"

namespace torch::nn {
class Module;
}

namespace cairn::libtorch {

class OperationWatch;

namespace detail {

class RecomputedSegment;

/// While it lives, what libtorch saves on this thread is noted in a segment, and not kept.
class [[nodiscard]] SegmentGuard {
 public:
  explicit SegmentGuard(std::function<void()> replay);
  ~SegmentGuard();
  SegmentGuard(const SegmentGuard&) = delete;
  SegmentGuard& operator=(const SegmentGuard&) = delete;

 private:
  std::shared_ptr<RecomputedSegment> segment_;
};

bool records();
torch::Tensor input_of_replay(const torch::Tensor& x);

}  // namespace detail

/// function(inputs...), with what its operations save recomputed in the backward. Tensors in the
/// inputs may be nested; both are kept until then, and what the function captures must live as
/// long. The function must do the same both times: a replay that saves other tensors throws
/// core::Error. Without a gradient to come it is a plain call.
template <class F, class... Inputs>
auto checkpoint(F function, Inputs... inputs) {
  if (!detail::records()) return std::invoke(function, inputs...);
  const detail::SegmentGuard segment([function, inputs...]() mutable {
    std::invoke(function, map_tensors(inputs, detail::input_of_replay)...);
  });
  return std::invoke(function, inputs...);
}

/// While it lives, what operations make and libtorch saves for its backward on this thread passes
/// through these hooks (checkpointing::Offload::hooks()). What was there before, parameters and
/// inputs, stays where it is. The innermost guard counts.
class [[nodiscard]] SavedTensorHooksGuard {
 public:
  explicit SavedTensorHooksGuard(autograd::SavedTensorHooks hooks);
  ~SavedTensorHooksGuard();
  SavedTensorHooksGuard(const SavedTensorHooksGuard&) = delete;
  SavedTensorHooksGuard& operator=(const SavedTensorHooksGuard&) = delete;

 private:
  std::unique_ptr<OperationWatch> watch_;
};

}  // namespace cairn::libtorch
