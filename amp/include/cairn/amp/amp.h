// Mixed precision by opt level.
//
//   amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
//   precision.backward(loss);                     // scales the loss, runs backward
//   optim::StepResult r = precision.step();       // checks, unscales, clips, updates; or skips,
//   halves the scale and says why
//
// There is no global state: the handle owns everything; two trainings in one process do not see
// each other.
//
// | property             | O0    | O1      | O2      | O3   |
// |----------------------|-------|---------|---------|------|
// | cast_model           | f32   | no      | half    | half |
// | autocast             | no    | yes     | no      | no   |
// | keep_batchnorm_fp32  | -     | -       | yes     | no   |
// | master_weights       | no    | -       | yes     | no   |
// | loss_scale           | 1     | dynamic | dynamic | 1    |     (bf16: 1 at every level)
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "cairn/amp/loss_scaler.h"
#include "cairn/nn/module.h"
#include "cairn/optim/optimizer.h"

namespace cairn::amp {

enum class OptLevel { O0, O1, O2, O3 };
OptLevel parse_opt_level(std::string_view text);  // "O0" ... "O3"; explains letter O against zero
std::string_view name(OptLevel level);

struct Options {
  OptLevel opt_level = OptLevel::O1;
  DType half_dtype = DType::f16;            // or bf16
  std::optional<bool> keep_batchnorm_fp32;  // O2, O3 only
  std::optional<bool> master_weights;       // O2, O3 only
  std::optional<double> loss_scale;         // a static scale; unset: the level's default
  bool dynamic_loss_scale = false;          // insists on dynamic where the level's default is 1
  LossScalerOptions scaler;
  double max_gradient_norm = 0.0;  // clips in the update pass; 0: no
  int accumulation_steps = 1;      // gradients are averaged over this many backwards
  /// Makes all ranks agree on an overflow: gets this rank's flag (0 or 1), returns the largest over
  /// all ranks. Unset: one rank.
  std::function<double(double)> all_reduce_max;
};

/// The scaled loss of `auto scaled = precision.scale_loss(loss); scaled.backward();`
class ScaledLoss {
 public:
  explicit ScaledLoss(Tensor loss) : loss_(std::move(loss)) {}
  const Tensor& tensor() const { return loss_; }
  void backward() const;

 private:
  Tensor loss_;
};

class Amp : public core::Stateful {
 public:
  ScaledLoss scale_loss(const Tensor& loss) const;
  void backward(const Tensor& loss) const { scale_loss(loss).backward(); }
  optim::StepResult step();

  const Options& options() const;  // as resolved
  double loss_scale() const;
  std::string describe() const;  // the resolved options, for people

  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

  struct Impl;
  explicit Amp(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// Casts the model, wraps its forward and prepares the optimizer as the level says. Throws
/// InvalidArgument for contradictory options and, naming it, for a parameter that is not f32. Call
/// it before or after DistributedDataParallel and load_state_dict: any order works, as long as it
/// comes before the first step.
Amp initialize(nn::Module& model, optim::Optimizer& optimizer, const Options& options = {});

}  // namespace cairn::amp
