// WeightAverage: a running average of weights, which often generalise better than the last ones: an
// exponential one (EMA; Polyak & Juditsky 1992) or an equal one (stochastic weight averaging, SWA;
// Izmailov et al. 2018). torch.optim.swa_utils.AveragedModel keeps it in a second model; here it
// lies beside the one model, and a scope puts it in.
//
//   optim::WeightAverage average(model.parameters(), {.decay = 0.999});
//   if (optimizer.step().applied) average.update();
//   {
//     const auto averaged = average.use();  // the model has the averages ...
//     const StateDict best = model.state_dict();
//   }                                       // ... and its own weights again, bit for bit
//
// Averages are f32 whatever the weights are (f16, bf16, f32), and are made of the exact values:
// those of f32 masters, or of bf16 weights and remainders, where there are some.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/tensor.h"

namespace cairn::optim {

struct WeightAverageOptions {
  double decay = 0.999;  // in [0, 1)
  bool equal = false;    // every update counts alike (SWA); decay is not looked at
};

class WeightAverage;

/// While it lives, the weights are the averages (masters exactly, half weights rounded). Its end
/// puts back what was there: the bits of weights, masters and remainders. Gradients are left alone,
/// so it may lie between two micro-batches of a window. What is written into the weights meanwhile
/// is undone, with a warning. Needs the memory of weights and masters once more.
class [[nodiscard]] AveragesInUse {
 public:
  ~AveragesInUse();  // restore(), and logs what that throws
  AveragesInUse(AveragesInUse&& other) noexcept;
  AveragesInUse& operator=(AveragesInUse&&) = delete;

  /// Before the end of the scope. Throws InvalidArgument, naming it, for a weight that was cast or
  /// moved meanwhile, or whose master was made or dropped, after restoring the others.
  void restore();

 private:
  friend class WeightAverage;
  struct Saved {
    NamedTensor weight;
    Tensor bits;            // of the weight
    Tensor master;          // f32 or i16; undefined: none
    std::uint64_t written;  // the weight's version with the average in it
  };
  explicit AveragesInUse(WeightAverage* owner) : owner_(owner) {}
  WeightAverage* owner_;  // null: restored, or moved from
  std::vector<Saved> saved_;
};

class WeightAverage : public core::Stateful {
 public:
  /// Averages these, beginning with their values. Batch norm's running statistics are the model's
  /// own unless its buffers are among them; then those of floating dtype are averaged too, and
  /// counts stay the model's. Throws InvalidArgument, naming it, for one without a name, listed
  /// twice, of f64 or not dense, and for a decay outside of [0, 1).
  explicit WeightAverage(const NamedTensors& weights, const WeightAverageOptions& options = {});
  WeightAverage(const WeightAverage&) = delete;  // a scope may point to it
  WeightAverage& operator=(const WeightAverage&) = delete;

  /// After an applied step. The first one copies the weights, as in PyTorch; then
  ///
  ///   average = decay average + (1 - decay) weight        or, with n updates before this one,
  ///   average = n / (n + 1) average + 1 / (n + 1) weight  where they count alike,
  ///
  /// in f32, in one pass over all tensors of a device (remainders and weights are put together
  /// first). Throws InvalidArgument while the averages are in use.
  void update();
  std::int64_t updates() const { return updates_; }

  /// Puts the averages into the weights. Throws InvalidArgument where they are in there already.
  /// The average outlives the scope.
  AveragesInUse use();
  /// f32, in the order of the weights that are averaged; a write to them counts.
  const NamedTensors& averages() const { return averages_; }

  /// updates, values: the averages, nested by name (sharing memory with this one).
  StateDict state_dict() const override;
  /// Throws DataError, naming everything that is missing, surplus or mis-shaped, and changes
  /// nothing then. The options stay this one's.
  void load_state_dict(const StateDict& state) override;

 private:
  friend class AveragesInUse;
  void follow_device();
  WeightAverageOptions options_;
  NamedTensors weights_;
  NamedTensors averages_;  // of each weight
  std::int64_t updates_ = 0;
  bool in_use_ = false;
};

}  // namespace cairn::optim
