// Activation recomputation: a segment of the forward keeps its inputs instead of what its
// operations save, and runs again in the backward.
//
//   Tensor y = checkpointing::checkpoint([&](const Tensor& x) { return block(x); }, x);
//
// Gradients are the same bits as without. There is one graph, so hooks of tied weights fire once;
// the replay runs under the thread state of the first run (random numbers, autocast, gradient
// mode), so dropout masks and casts repeat, batch norms leave their running statistics alone, and
// the generator stands afterwards where it stood. Each segment is replayed once per backward, up to
// the last tensor that is still needed. Segments may be nested and may be combined with other
// saved-tensor hooks. Nothing is kept or replayed under no_grad.
//
// The function must do the same both times: a replay whose tensors differ in shape, dtype or device
// from the first run's ends in a core::Error that names their position and both. An input written
// in place in between is an error too. With retain_graph the replayed tensors stay.
#pragma once

#include <functional>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::nn {
class Sequential;
}

namespace cairn::checkpointing {

using Segment = std::function<Tensor(const Tensor&)>;
using SegmentOfMany = std::function<Tensor(const std::vector<Tensor>&)>;

/// function(x), with its activations recomputed in the backward. The function is kept until then;
/// what it captures must live as long.
Tensor checkpoint(const Segment& function, const Tensor& x);
Tensor checkpoint(const SegmentOfMany& function, const std::vector<Tensor>& inputs);

/// Runs the functions one after another, cut into `segments` of n / segments functions each, of
/// which the last (with the rest) is kept whole: its backward comes first. Throws
/// core::InvalidArgument unless 1 <= segments <= n.
Tensor checkpoint_sequential(const std::vector<Segment>& functions, int segments, const Tensor& x);
/// The same over a Sequential's modules.
Tensor checkpoint_sequential(nn::Sequential& modules, int segments, const Tensor& x);

}  // namespace cairn::checkpointing
