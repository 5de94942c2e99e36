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
// The function must do the same both times: a replay whose operations, or the shapes, dtypes or
// devices of what they save, differ from the first run's ends in a core::Error that names the
// operation and both. An input written in place in between is an error too. With retain_graph the
// replayed tensors stay.
//
// A policy keeps the results of chosen operations, here or offloaded, and a replay takes them
// instead of running those operations again:
//
//   Tensor y = checkpointing::checkpoint([&](const Tensor& x) { return block(x); }, x,
//                                        {.policy = checkpointing::recompute_only({"attention"})});
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::nn {
class Sequential;
}

namespace cairn::checkpointing {

class Offload;

using Segment = std::function<Tensor(const Tensor&)>;
using SegmentOfMany = std::function<Tensor(const std::vector<Tensor>&)>;
using SegmentToMany = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

/// What becomes of an operation's result. `must_` holds always, `prefer_` up to
/// CheckpointOptions::preferred_bytes.
enum class Treatment {
  must_save,
  prefer_save,
  must_recompute,
  prefer_recompute,
  must_offload,
  prefer_offload
};

/// One operation of a segment, as a policy sees it.
struct SegmentOperation {
  std::string_view name;  // as observers and autocast's table name it; lives as long as the program
  int occurrence = 0;     // of this name in the segment, from 0
  bool operator==(const SegmentOperation&) const = default;
};
using Policy = std::function<Treatment(const SegmentOperation&)>;

/// Keeps the results of these operations and recomputes the others, or the other way round. Throws
/// core::InvalidArgument for a name that no operation of the program has.
Policy save_only(const std::vector<std::string>& operations);
Policy recompute_only(const std::vector<std::string>& operations);
/// Recomputes normalisations, activations, dropout and what else costs no product: element-wise
/// operations and copies.
Policy recompute_cheap();

struct CheckpointOptions {
  Policy policy;  // none: everything is recomputed. Views are, whatever it says: they cost nothing
  /// Once a segment keeps as many bytes of results, preferred ones are recomputed.
  std::size_t preferred_bytes = SIZE_MAX;
  std::shared_ptr<Offload> offload;  // where must_offload and prefer_offload go
  /// Compares the bits of every replayed tensor with the first run's; the host waits for each.
  bool check_bits = false;
};

/// function(x), with its activations recomputed in the backward. The function is kept until then;
/// what it captures must live as long.
Tensor checkpoint(const Segment& function, const Tensor& x, const CheckpointOptions& options = {});
Tensor checkpoint(const SegmentOfMany& function, const std::vector<Tensor>& inputs,
                  const CheckpointOptions& options = {});
std::vector<Tensor> checkpoint(const SegmentToMany& function, const std::vector<Tensor>& inputs,
                               const CheckpointOptions& options = {});

// How a chain of n functions is cut. One activation is what runs between two functions.

/// `count` segments of n / count functions each, of which the last (with the rest) is kept whole:
/// its backward comes first. count inputs and n / count functions' activations at once.
struct Segments {
  int count = 1;
};
/// Segments{sqrt(n)}, the least memory that segments give.
struct SqrtSegments {};
/// Groups of `length` functions, each of them recomputed, the last one too.
struct Uniform {
  int length = 1;
};
/// The first `count` functions recomputed one by one, the others kept: as much recomputation as the
/// memory asks for.
struct FirstBlocks {
  int count = 1;
};
/// Halves within halves: log2(n) inputs and one function's activations; each function runs
/// forward up to log2(n) / 2 times more on average.
struct Recursive {};
/// The input and one function's activations, whatever n; n / 2 times the forward. The chain's
/// length is limited by the thread's stack (some thousands).
struct ConstantMemory {};

using Strategy =
    std::variant<Segments, SqrtSegments, Uniform, FirstBlocks, Recursive, ConstantMemory>;

/// Runs the functions one after another with the activations that the strategy recomputes. Throws
/// core::InvalidArgument where a count or length is not between 1 and n (FirstBlocks: 0 and n).
Tensor checkpoint_sequential(const std::vector<Segment>& functions, const Strategy& strategy,
                             const Tensor& x, const CheckpointOptions& options = {});
/// The same over a Sequential's modules.
Tensor checkpoint_sequential(nn::Sequential& modules, const Strategy& strategy, const Tensor& x,
                             const CheckpointOptions& options = {});
/// The same with Segments{segments}.
Tensor checkpoint_sequential(const std::vector<Segment>& functions, int segments, const Tensor& x);
Tensor checkpoint_sequential(nn::Sequential& modules, int segments, const Tensor& x);

}  // namespace cairn::checkpointing
