// Mixed precision by opt level.
//
//   amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
//   precision.backward(loss);                     // scales the loss, runs backward
//   optim::StepResult r = precision.step();       // checks, unscales, clips, updates; or skips,
//                                                 // halves the scale and says why
//
// There is no global state: the handle owns everything; two trainings in one process do not see
// each other. The model keeps its casts when the handle ends.
//
// | property            | O0  | O1      | O2      | O3   |
// |---------------------|-----|---------|---------|------|
// | model               | f32 | f32     | half    | half |
// | autocast            | no  | yes     | no      | no   |
// | keep_batchnorm_fp32 | -   | -       | yes     | no   |
// | master_weights      | -   | -       | yes     | no   |
// | loss_scale          | 1   | dynamic | dynamic | 1    |   (bf16: 1 at every level)
//
// Every level checks the gradients and skips an update that is not finite, static scales included
// (Apex applies it there).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cairn/amp/loss_scaler.h"
#include "cairn/nn/module.h"
#include "cairn/optim/optimizer.h"

namespace cairn::amp {

enum class OptLevel { O0, O1, O2, O3 };
/// "O0" ... "O3". Throws InvalidArgument that explains the letter O where a zero was typed.
OptLevel parse_opt_level(std::string_view text);
std::string_view name(OptLevel level);

struct Options {
  OptLevel opt_level = OptLevel::O1;
  DType half_dtype = DType::f16;            // or bf16
  std::optional<bool> keep_batchnorm_fp32;  // O2, O3 only
  std::optional<bool> master_weights;       // O2, O3 only
  std::optional<double> loss_scale;         // a static scale; unset: the level's default
  bool dynamic_loss_scale = false;          // insists on dynamic where the level's default is 1
  LossScalerOptions scaler;        // of a dynamic scale; dynamic is resolved from the above
  double max_gradient_norm = 0.0;  // clips in the update pass; 0: no
  int accumulation_steps = 1;      // gradients are averaged over this many backwards
  /// Makes all ranks agree on an overflow: gets this rank's flag (0 or 1), returns the largest over
  /// all ranks. Unset: one rank.
  std::function<double(double)> all_reduce_max;
};

/// Fills in the level's defaults: keep_batchnorm_fp32 and master_weights at O2 and O3, loss_scale
/// where it is static, dynamic_loss_scale and scaler.dynamic. Throws InvalidArgument, naming both
/// options, for a contradiction, and for impossible values.
Options resolve(Options options);
/// Resolved options in one line, for people.
std::string describe(const Options& resolved);

/// The scaled loss of `auto scaled = precision.scale_loss(loss); scaled.backward();`
class ScaledLoss {
 public:
  explicit ScaledLoss(Tensor loss) : loss_(std::move(loss)) {}
  const Tensor& tensor() const { return loss_; }
  void backward() const;

 private:
  Tensor loss_;
};

/// The handle. Copies share their state. The optimizer must outlive it and stay where it is.
class Amp : public core::Stateful {
 public:
  /// loss (one element, any floating dtype) in f32, times the scale.
  ScaledLoss scale_loss(const Tensor& loss) const;
  void backward(const Tensor& loss) const { scale_loss(loss).backward(); }
  /// After the step's backward(s): the optimizer's two passes with the gradients divided by the
  /// scale and the accumulation steps, or a skip where any rank's gradients are not finite; then
  /// the scaler's update. StepResult::reason says what was skipped and what became of the scale.
  optim::StepResult step();

  const Options& options() const;  // as resolved
  double loss_scale() const;
  std::string describe() const;  // the resolved options, for people

  /// opt_level, half_dtype, loss_scale_kind; loss_scaler0: loss_scale, unskipped.
  StateDict state_dict() const override;
  /// The state of any level and half dtype: models and optimizers save full precision, so only the
  /// loss scale belongs to the level. It is taken over where both scales are dynamic; a static one
  /// stays as the options say. Logs what differs.
  void load_state_dict(const StateDict& state) override;

  struct Impl;
  explicit Amp(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// Casts the model, wraps its forward and prepares the optimizer as the level says.
///   O0: forward casts floating input to f32.
///   O1: forward runs in an autocast region of the half dtype.
///   O2, O3: floating parameters and buffers become half, except batch norm's statistics and, with
///   keep_batchnorm_fp32, its weight and bias; forward casts floating input to half and its result
///   to f32. With master_weights, each parameter that requires a gradient gets an f32 master of
///   exactly its value.
/// Call it before or after DistributedDataParallel and load_state_dict: any order works, as long as
/// it comes before the first step, once for a model.
/// Throws InvalidArgument as resolve() does and, naming it, for a floating parameter or buffer that
/// is not f32.
Amp initialize(nn::Module& model, optim::Optimizer& optimizer, const Options& options = {});

}  // namespace cairn::amp
