// CommunicationHook: how the gradients of a bucket travel between ranks. Without one they are
// all-reduced in their dtype.
//
//   const auto power_sgd = parallel::power_sgd({.rank = 4});
//   parallel::DistributedDataParallel ddp(model, group, {.hook = power_sgd});
//   const auto own = parallel::communication_hook(
//       [](const parallel::GradientBucket& bucket, const parallel::ProcessGroup& ranks) {
//         ranks.all_reduce(bucket.data, parallel::ReduceOp::mean, bucket.name);
//       });
//
// A hook runs on the host when a bucket is full, with the communication stream current: what it
// queues is done in that stream's order, the same on every rank. It calls the same collectives on
// every rank and leaves the same values there. A hook belongs to one reducer. In a group of one
// nothing is reduced and no hook runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/tensor_view.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

struct GradientBucket {
  /// [elements], one dtype and device. In: this rank's gradients; out: their average over the
  /// ranks. May have gaps between the gradients, whose values do not matter.
  TensorView data;
  std::vector<std::string> names;     // of the gradients
  std::vector<TensorView> gradients;  // the part of each, shaped like it
  /// For errors, and as ranks compare it: "loss 1 scaled by 8: gradients fc.bias ... fc.weight".
  std::string name;
  std::int64_t pass = 0;  // how many passes (steps) were reduced before this one
};

class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;
  virtual void reduce(const GradientBucket& bucket, const ProcessGroup& group) = 0;
  /// What a resumed run needs. `of_this_rank` false: only what is the same on every rank, for a
  /// training state; true: what this rank alone has as well (errors that are fed back), to be saved
  /// rank by rank.
  virtual StateDict state_dict(bool /*of_this_rank*/) const { return {}; }
  virtual void load_state_dict(const StateDict& /*state*/) {}
  /// Its name and what all ranks must have alike, on one line, "power_sgd(rank 4 ...)": ranks whose
  /// hooks are described differently get an InvalidArgument where gradients are registered.
  virtual std::string describe() const { return "a hook"; }
};

/// A function of the user's; describe() calls each of them "a function".
std::shared_ptr<CommunicationHook> communication_hook(
    std::function<void(const GradientBucket&, const ProcessGroup&)> reduce);

/// f32 and f64 gradients travel as f16 or bf16: each rank divides by the number of ranks and
/// rounds, the sum is rounded again. Half gradients travel as they are. Throws InvalidArgument for
/// another dtype.
std::shared_ptr<CommunicationHook> compress_to(DType dtype);

struct PowerSgdOptions {
  /// Of the approximation P Q^T of each gradient, taken as a matrix [size 0, the rest]; at most the
  /// smaller side.
  int rank = 1;
  /// Passes that are reduced exactly before the first one that is not.
  std::int64_t start_step = 1000;
  /// Gradients for which rank (m + n) min_compression_rate >= m n travel exactly, as vectors do. 0:
  /// every matrix is compressed.
  double min_compression_rate = 2.0;
  /// Adds what the last pass left out of a gradient to the next one.
  bool error_feedback = true;
  /// Begins each power iteration where the last one ended.
  bool warm_start = true;
  std::uint64_t seed = 0;
};
/// PowerSGD (Vogels, Karimireddy, Jaggi 2019): one step of a power iteration in f32, two small
/// all-reduces for the matrices of a bucket and one for its vectors. P Q^T is exact where the rank
/// of the averaged gradient is not above `rank`; with error feedback the sum over passes follows
/// the truth, short of the last error. A pass with an inf or NaN on any rank gives NaN to all, and
/// what was left out before it is forgotten (a loss scale will be another one afterwards).
std::shared_ptr<CommunicationHook> power_sgd(const PowerSgdOptions& options = {});

}  // namespace cairn::parallel
