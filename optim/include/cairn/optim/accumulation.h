// Gradient accumulation as one scope: the gradient of several micro-batches, of any sizes, on any
// number of ranks, equals that of all their samples in one batch, within rounding.
//
//   optim::Accumulation accumulation({.steps = 4});
//   for (const auto& batch : loader) {
//     auto micro = accumulation.begin(batch.size(), {.last = loader.remaining_batches() == 0});
//     Tensor loss = nn::cross_entropy(model(batch.inputs), batch.labels);  // a mean over the batch
//     precision.backward(loss, {.weight = micro.weight()});
//     if (!micro.last()) continue;
//     schedule.step(precision.step({.gradient_scale = accumulation.finish()}));
//   }
//
// Each rank adds up sum over micro-batches of weight * d(mean loss), with weight = count /
// reference; the reference is a count that all ranks share and that is near the usual one, so that
// scaled losses stay as large as without accumulation (f16). finish() gives what turns the sum of
// all into the mean over all samples: reference / total count, times the world size where the
// gradients were averaged over the ranks.
//
// Optimizer steps, schedules, loss-scale updates and checkpoints belong at the boundary only. Every
// rank begins and finishes alike; a rank that has run out of samples begins with count 0 and a
// finite loss of its choice (weight 0).
#pragma once

#include <cstdint>

#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"

namespace cairn::optim {

struct AccumulationOptions {
  std::int64_t steps = 1;   // micro-batches before an update; not looked at where tokens > 0
  std::int64_t tokens = 0;  // > 0: update once that many samples (or tokens: what begin() counts)
                            // were seen on all ranks together
  /// DistributedDataParallel::world(): gradients are then averaged over the ranks in the last
  /// micro-batch of a window only, and counts are summed over them. Unset: one rank.
  World world;
};

class Accumulation;

/// One micro-batch, from begin() until after its backward. Where an exception passes through it,
/// the window is abandoned.
class [[nodiscard]] MicroBatch {
 public:
  ~MicroBatch();
  MicroBatch(MicroBatch&& other) noexcept;
  MicroBatch& operator=(MicroBatch&&) = delete;

  double weight() const { return weight_; }  // multiply the mean loss of this micro-batch by it
  bool last() const { return last_; }        // after its backward: finish() and step

 private:
  friend class Accumulation;
  MicroBatch(Accumulation* owner, double weight, bool last);
  Accumulation* owner_;
  double weight_;
  bool last_;
  int exceptions_;  // in flight when it began
};

class Accumulation : public core::Stateful {
 public:
  /// Throws InvalidArgument for steps < 1 or tokens < 0.
  explicit Accumulation(const AccumulationOptions& options = {});
  ~Accumulation() override;  // an open window: turns the reduction on again
  Accumulation(const Accumulation&) = delete;
  Accumulation& operator=(const Accumulation&) = delete;

  struct BeginOptions {
    bool last = false;  // ends the window here (the end of an epoch); on all ranks alike
  };
  /// `count`: samples (or tokens) that the loss of this micro-batch is the mean of, on this rank.
  /// One sum over the ranks where tokens are counted, or in the very first window; else none.
  /// Throws InvalidArgument for count < 0, for 0 on all ranks of a window's only or (by tokens) any
  /// micro-batch, after the boundary before finish(), and after an exception before reset().
  MicroBatch begin(std::int64_t count, const BeginOptions& options);
  MicroBatch begin(std::int64_t count) { return begin(count, BeginOptions()); }
  /// At the boundary: the factor for the gradients (StepOptions::gradient_scale), and a new window.
  /// One sum over the ranks. Throws InvalidArgument before the boundary.
  double finish();
  /// Gives an open window up and turns the reduction on; the caller clears the gradients.
  void reset();

  bool open() const { return micro_batches_ > 0; }               // between begin() and finish()
  std::int64_t micro_batches() const { return micro_batches_; }  // begun in this window
  double count() const { return seen_; }  // in this window: by tokens over all ranks, else here

  /// reference: so that a resumed run continues bit for bit. Checkpoints belong at boundaries: a
  /// half-done window throws InvalidArgument, its gradients are in no state.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  friend class MicroBatch;
  void check_may_begin(std::int64_t count) const;
  void end_window();

  AccumulationOptions options_;
  double reference_ = 0;  // 0: before the very first micro-batch
  double own_ = 0;        // counted on this rank in this window
  double seen_ = 0;
  std::int64_t micro_batches_ = 0;
  bool at_boundary_ = false;
  bool abandoned_ = false;
};

}  // namespace cairn::optim
