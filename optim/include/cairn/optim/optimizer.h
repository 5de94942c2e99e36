// Optimizers that update in two passes over all parameters: check + norm, then unscale + clip + update + half write.
//
// Parameters may be f32 (updated in place) or half. A half parameter gets an f32 master (kept in its GradMeta::master, created from its
// f32 value by amp::initialize, or from its half value at the first step) and is rounded from it after each update; master_weights =
// false updates the half value itself. Moments are f32. Parameters without a gradient are left alone. step() never zeroes gradients:
// it ends by clearing them (they count as unwritten), unless asked to keep them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/optim/arena.h"

namespace cairn::optim {

/// What a step did.
struct StepResult {
  bool applied = true;
  std::string reason;           // empty, or "inf in the gradient of conv1.weight (3 elements); loss scale 65536 -> 32768"
  std::string culprit;          // the parameter with the first non-finite gradient
  double gradient_norm = 0.0;   // of the unscaled gradients, before clipping; NaN where skipped
  double clip_coefficient = 1.0;
};

struct StepOptions {
  double gradient_scale = 1.0;   // gradients are multiplied by this: 1 / loss scale, 1 / accumulation steps
  bool check = true;             // skip the update where a gradient is not finite
  double max_gradient_norm = 0;  // 0: no clipping
  bool keep_gradients = false;
};

struct ParameterGroup {
  NamedTensors parameters;
  double lr = 1e-3;
  double weight_decay = 0.0;
};

class Optimizer : public core::Stateful {
 public:
  StepResult step(const StepOptions& options = {});
  /// The two passes one by one, for callers that decide between them (the loss scaler, ranks that must agree).
  kernels::GradientCheck check() const;
  void update(const kernels::GradientCheck& check, const StepOptions& options, StepResult& result);
  void clear_grad();

  std::vector<ParameterGroup>& groups() { return groups_; }
  const std::vector<ParameterGroup>& groups() const { return groups_; }
  void add_group(ParameterGroup group);
  double lr() const { return groups_.front().lr; }
  void set_lr(double lr);  // of every group
  std::int64_t steps() const { return steps_; }  // applied ones
  void set_master_weights(bool value) { master_weights_ = value; }
  /// After parameters changed dtype or device: masters and the arena are made anew where needed.
  void refresh();
  const std::shared_ptr<GradientArena>& arena();

  StateDict state_dict() const override;  // step count, groups, moments by parameter name; masters are saved with the model
  void load_state_dict(const StateDict& state) override;

 protected:
  explicit Optimizer(std::vector<ParameterGroup> groups);
  struct State {
    Tensor moment1, moment2;
  };
  virtual void update_group(const ParameterGroup& group, std::vector<kernels::UpdateEntry> entries, double gradient_scale) = 0;
  virtual int moments() const = 0;  // 0, 1 or 2 per parameter
  std::int64_t steps_ = 0;

 private:
  std::vector<ParameterGroup> groups_;
  std::vector<std::vector<State>> state_;  // by group and parameter
  std::shared_ptr<GradientArena> arena_;
  bool master_weights_ = true;
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool adamw = true;  // decoupled weight decay; false: L2
  bool bias_correction = true;
};
class FusedAdam final : public Optimizer {
 public:
  explicit FusedAdam(NamedTensors parameters, const AdamOptions& options = {});
  FusedAdam(std::vector<ParameterGroup> groups, const AdamOptions& options);

 protected:
  void update_group(const ParameterGroup& group, std::vector<kernels::UpdateEntry> entries, double gradient_scale) override;
  int moments() const override { return 2; }

 private:
  AdamOptions options_;
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool wd_after_momentum = false;
};
class FusedSGD final : public Optimizer {
 public:
  explicit FusedSGD(NamedTensors parameters, const SgdOptions& options = {});
  FusedSGD(std::vector<ParameterGroup> groups, const SgdOptions& options);

 protected:
  void update_group(const ParameterGroup& group, std::vector<kernels::UpdateEntry> entries, double gradient_scale) override;
  int moments() const override { return options_.momentum != 0.0 ? 1 : 0; }

 private:
  SgdOptions options_;
};

}  // namespace cairn::optim
