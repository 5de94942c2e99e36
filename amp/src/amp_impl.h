#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/amp/amp.h"
#include "cast_model.h"
#include "device_scaler.h"
#include "fallback.h"
#include "loss_contributions.h"
#include "overflow_agreement.h"

namespace cairn::amp {

/// The last contribution of each loss that a step ends, by loss_id.
using EndedLosses = std::map<int, LossContributionPtr>;

struct Amp::Impl {
  struct Loss {
    LossScaler scaler;
    bool carried = false;          // an overflow whose check was delayed
    optim::SkipStreak collapsing;  // overflows in a row with the scale at its minimum
  };

  Impl(Options resolved, const std::vector<nn::Module*>& models,
       const std::vector<optim::Optimizer*>& optimizers);

  /// The optimizers that a loss was given to, ascending. Throws where it cannot be scaled.
  std::vector<std::size_t> optimizers_of(const LossOptions& options, const char* where);
  /// What the gradients of a loss at this scale say of themselves.
  core::GradientScale scale_of(const LossOptions& options, double scale,
                               const std::vector<std::size_t>& optimizers);
  /// The loss scale, f32 [1], where it lies on the device; else undefined.
  Tensor device_scale() const {
    return device && options.dynamic_loss_scale ? device->scale() : Tensor();
  }
  /// Of GradientScale; 0 where no loss is ever scaled: gradients of a plain backward do no harm
  /// then.
  std::uint64_t scaler_id() const {
    return options.dynamic_loss_scale || options.scaler.init_scale != 1.0 ? id_ : 0;
  }
  Tensor scaled(const Tensor& loss, double factor);
  void backward(const Tensor& scaled, double scale, const LossOptions& options);
  /// One result for each of these optimizers.
  std::vector<optim::StepResult> step(const std::vector<std::size_t>& which,
                                      optim::StepOptions options);
  Loss& loss(int id, const char* where);
  /// What the host believes of the scale, read from the device where it lies there.
  LossScaler& current_scaler(int id, const char* where);
  /// Moves the host's scaler, just loaded, to the device.
  void write_scaler();
  optim::Optimizer& only_optimizer() { return contributions[0]; }
  void refresh_optimizers();
  void throw_if_collapsed();
  void load_fp32_layers(const StateDict& state);

  Options options;
  std::vector<Loss> losses;
  LossContributions contributions;
  Fallback fallback;  // its casts lie inside the models'
  std::vector<nn::Module*> models;
  bool released = false;
  std::deque<Overflow> overflows;
  std::int64_t steps = 0;
  std::optional<DeviceScaler> device;                       // of a capturable handle
  std::int64_t reported_steps = 0, reported_overflows = 0;  // by report()

 private:
  std::uint64_t id_ = core::next_scaler_id();
  void check_world(const optim::Optimizer& optimizer) const;
  void check_step(const std::vector<std::size_t>& which, const optim::StepOptions& options);
  void check_losses(const std::vector<std::size_t>& which) const;
  StepReport found_by(const LossContributions::Resolved& resolved,
                      const std::vector<std::size_t>& which) const;
  /// Updates the loss's scaler, remembers its overflow; returns what is to be said of it.
  std::string judge(const LossContribution& ended, const StepReport& all);
  std::string fall_back_if_due(const EndedLosses& losses_ended, const StepReport& all);
  std::vector<optim::StepResult> update(const std::vector<std::size_t>& which,
                                        const LossContributions::Resolved& resolved,
                                        const StepReport& all,
                                        const optim::StepOptions& step_options);
  std::vector<optim::StepResult> step_on_device(const std::vector<std::size_t>& which,
                                                optim::StepOptions options);
};

}  // namespace cairn::amp
