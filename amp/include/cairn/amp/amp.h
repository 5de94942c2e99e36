// Mixed precision by opt level.
//
//   amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
//   precision.backward(loss);                     // scales the loss, runs backward
//   optim::StepResult r = precision.step();       // checks, unscales, clips, updates; or skips,
//                                                 // halves the scale and says why
//
// Several models, optimizers and losses (a GAN):
//
//   amp::Amp precision =
//       amp::initialize({&d, &g}, {&d_optimizer, &g_optimizer}, {.num_losses = 3});
//   precision.backward(real, {.loss_id = 0, .optimizers = {&d_optimizer}});
//   precision.backward(fake, {.loss_id = 1, .optimizers = {&d_optimizer}});
//   optim::StepResult d_result = precision.step(d_optimizer);
//   precision.backward(fooled, {.loss_id = 2, .optimizers = {&g_optimizer}});
//   optim::StepResult g_result = precision.step(g_optimizer);
//   d_optimizer.clear_grad();                     // the third loss went through d as well
//
// There is no global state: the handle owns everything; two trainings in one process do not see
// each other. Every level checks the gradients and skips an update that is not finite, static
// scales included (Apex applies it there). The host waits for the device once a step.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/amp/loss_scaler.h"
#include "cairn/amp/options.h"
#include "cairn/amp/overflow.h"
#include "cairn/nn/module.h"
#include "cairn/optim/optimizer.h"

namespace cairn::amp {

/// Of one backward.
struct LossOptions {
  int loss_id = 0;  // whose scaler
  /// Whose gradients are checked for an overflow of this loss, wherever it reaches. Empty: all.
  /// Each that holds gradients of a loss that overflowed skips its next step.
  std::vector<optim::Optimizer*> optimizers;
  /// The loss is multiplied by this as well: a micro-batch's share (optim::Accumulation).
  double weight = 1.0;
  /// More backwards of this loss follow before the step: step() refuses until one without it. (Apex
  /// needs it to avoid checks; here gradients of one loss are always checked once, in the step.)
  bool delay_unscale = false;
  /// The loss's scaler is left alone in the next step; what this backward overflows counts in the
  /// step after a backward without it. (The step is skipped all the same.)
  bool delay_overflow_check = false;
  /// Another backward through the same graph follows (autograd::BackwardOptions).
  bool retain_graph = false;
};

/// The scaled loss of `auto scaled = precision.scale_loss(loss); scaled.backward();` Several may
/// wait for their backwards at once, in any order.
class [[nodiscard]] ScaledLoss {
 public:
  ScaledLoss(Tensor loss, std::function<void(const Tensor&)> backward)
      : loss_(std::move(loss)), backward_(std::move(backward)) {}
  const Tensor& tensor() const { return loss_; }
  void backward() const { backward_(loss_); }

 private:
  Tensor loss_;
  std::function<void(const Tensor&)> backward_;
};

/// While it lives, operations run as inside a model's forward: `auto region = precision.region();`
class [[nodiscard]] Region {
 public:
  Region(const Options& options, bool autocast);

 private:
  std::optional<autograd::AutocastGuard> autocast_;
  std::optional<autograd::CastPolicyGuard> policies_;
};

/// The handle. Copies share their state. Models and optimizers must outlive it and stay where they
/// are: a step or a loss after an optimizer was moved throws InvalidArgument.
class [[nodiscard]] Amp : public core::Stateful {
 public:
  /// loss (one element, any floating dtype) in f32, times the scale of its scaler. Gradients of one
  /// loss accumulate scaled, in place, until the step. The backward of another loss first checks
  /// and moves them, unscaled, into f32 sums: scales may differ, and an overflow is known for the
  /// loss that caused it.
  ScaledLoss scale_loss(const Tensor& loss, const LossOptions& options = {}) const;
  void backward(const Tensor& loss, const LossOptions& options = {}) const {
    scale_loss(loss, options).backward();
  }
  /// For gradients that were scaled by hand, with loss_scale(options.loss_id): a trainer's own
  /// backward, or a plain one. Before the step; a step refuses gradients that nobody is known to
  /// have scaled, unless there is no scale (O0, bf16).
  void adopt_gradients(optim::Optimizer& optimizer, const LossOptions& options = {}) const;
  /// As torch's: from now until the step the optimizer's gradients, grad(), are the whole ones
  /// without loss scale, f32 (in sums beside their slots, 4 bytes an element), to be read, clipped
  /// or edited by hand. Checks them: the step skips where they were not finite, whatever became of
  /// them. Further backwards may follow. A collective where ranks have not reduced them yet. Throws
  /// Unsupported where the handle is capturable.
  void unscale(optim::Optimizer& optimizer) const;
  /// A parameter's gradient as it is without the loss scale, f32; undefined where it has none. A
  /// copy.
  Tensor unscaled_gradient(const Tensor& parameter) const;

  /// Around whatever is not the model's operator(): several inputs, lstm.run(), a submodule, a
  /// loss. At O1 an autocast region; else nothing, unless a layer fell back.
  Region region() const;
  /// The input of such a call: a floating tensor in the model's dtype at O2 and O3, else as it is.
  Tensor cast(const Tensor& x) const;

  /// After the step's backward(s): the optimizer's two passes with the gradients divided by the
  /// scale (options.gradient_scale multiplies on top: 1 / micro-batches, Accumulation::finish()),
  /// or a skip where a gradient of any of its losses, on any rank, is not finite; then the update
  /// of those losses' scalers. max_gradient_norm 0 means amp::Options'. StepResult::reason says
  /// what was skipped and what became of the scale. Where no parameter has a gradient, nothing is
  /// applied and no counter moves. Throws LossScaleCollapse where the run is broken;
  /// InvalidArgument, before anything changes, for gradients of a plain backward (adopt_gradients)
  /// and where a DistributedDataParallel reduces gradients of which Options::world does not know.
  optim::StepResult step(optim::Optimizer& optimizer, const optim::StepOptions& options = {});
  /// Every optimizer, each clipped by the norm of its own gradients. Of those that have gradients,
  /// the result says: applied where all were; all reasons; the first culprit; the norm (of
  /// options.norm_type) of all gradients together, the smallest clip coefficient.
  optim::StepResult step(const optim::StepOptions& options = {});

  const Options& options() const;  // as resolved
  double loss_scale(int loss_id = 0) const;
  const LossScaler& scaler(int loss_id = 0) const;
  std::string describe() const;  // the resolved options, for people
  /// The last Options::overflow_history overflows, the newest last; overflow_report() prints them.
  std::vector<Overflow> overflows() const;
  /// Layers that fell back to f32 ("encoder.fc1"; of several models "1/encoder.fc1").
  std::vector<std::string> fp32_layers() const;

  /// From now on a step takes no host, so that a captured graph can repeat it (CapturedStep, which
  /// says this itself): the loss scale and what decides whether a step is applied lie on the
  /// device, and the optimizer is capturable. The bits are those of other steps. What a step did is
  /// not known (StepResult::known): report() tells. loss_scale(), scaler() and states wait for the
  /// device; overflows() has no step of these. Throws Unsupported for several losses or optimizers,
  /// several ranks other than of a DistributedDataParallel's world(), fallback_after, and what the
  /// optimizer refuses.
  void set_capturable(bool value);
  bool capturable() const;
  /// What the capturable steps since the last call did; waits for the device. applied: none was
  /// skipped; reason: "3 of 50 steps skipped: inf or NaN in the gradient of conv1.weight, and 4
  /// more parameters; loss scale 4096"; culprit: the first of these parameters. Throws
  /// LossScaleCollapse where the last Options::collapse_after steps, or more, were all skipped with
  /// the scale at its minimum.
  optim::StepResult report();

  /// Gives the models back as they came: f32 values (the masters), no casts around forward, no
  /// gradients. The handle takes no further loss and no step; the models may be initialized again.
  void release();

  /// opt_level, half_dtype, loss_scale_kind; loss_scaler0 ...: loss_scale, unskipped (Apex's keys);
  /// fp32_layers, where there are any.
  StateDict state_dict() const override;
  /// The state of any level and half dtype: models and optimizers save full precision, so only the
  /// loss scale belongs to the level. Ends what is pending: gradients, overflows, unread checks.
  /// The scale is taken over where both scales are dynamic; a static one stays as the options say.
  /// Logs what differs. Also reads the state of apex.amp (loss_scaler0 ... alone) and, for one
  /// loss, of torch.amp.GradScaler.
  void load_state_dict(const StateDict& state) override;
  /// As apex.amp.load_state_dict takes it.
  StateDict apex_state_dict() const;

  struct Impl;
  explicit Amp(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  friend class CapturedStep;
  std::shared_ptr<Impl> impl_;
};

/// Casts the models, wraps their forward and prepares the optimizers as the level says.
///   O0: forward casts floating input to f32.
///   O1: forward runs in an autocast region of the half dtype.
///   O2, O3: floating parameters and buffers become half, except batch norm's statistics and, with
///   keep_batchnorm_fp32, its weight and bias; forward casts floating input to half and its result
///   to f32 (cast_model_outputs). With master_weights, each of these parameters, frozen ones
///   too, gets an f32 master of exactly its value.
/// Call it before or after DistributedDataParallel and load_state_dict: any order works, as long as
/// it comes before the first step, once for a model (release() allows another time). Throws
/// InvalidArgument as resolve() does; for a model or an optimizer given twice, a parameter of two
/// optimizers, a model that is initialized already and, naming it, for a floating parameter or
/// buffer that is not f32.
Amp initialize(const std::vector<nn::Module*>& models,
               const std::vector<optim::Optimizer*>& optimizers, const Options& options = {});
Amp initialize(nn::Module& model, optim::Optimizer& optimizer, const Options& options = {});

/// Amp::release() for one model, where the handle is gone. Nothing where it is not initialized.
void release(nn::Module& model);

}  // namespace cairn::amp
