// What amp needs of an optimizer beyond what a trainer uses: the parts of a step between which it
// decides. Each says here or in optimizer.h what it does. Not for trainers: it may change with any
// version.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

class OptimizerAccess {
 public:
  explicit OptimizerAccess(Optimizer& optimizer) : optimizer_(optimizer) {}

  void check_not_moved() const { optimizer_.check_not_moved(); }
  /// Allocates slots and master weights for parameters that were unfrozen or cast since the last
  /// step.
  void prepare() const;
  void refresh() const { optimizer_.refresh(); }
  bool has_gradient() const { return optimizer_.has_gradient(); }

  // A step, in this order.
  void wait_for_reductions() const { optimizer_.wait_for_reductions(); }
  void check_scaler(std::uint64_t scaler) const { optimizer_.check_scaler(scaler); }
  void prepare_gradients() const { optimizer_.prepare_gradients(); }
  bool needs_report(const StepOptions& options) const { return optimizer_.needs_report(options); }
  PendingReport begin_own_check(double norm_type) const {
    return optimizer_.begin_own_check(norm_type);
  }
  /// Where ranks divide gradients: of this rank's parts; begin_update() completes it.
  static std::vector<GradientReport> read_own(const std::vector<PendingReport>& pending,
                                              std::vector<kernels::PendingCheck> others) {
    return PendingReport::read_own(pending, std::move(others));
  }
  /// An update in two halves: all memory is there before anything, of several optimizers too, is
  /// written.
  using Update = Optimizer::Update;
  Update begin_update(const GradientReport& report, const StepOptions& options) const {
    return optimizer_.begin_update(report, options);
  }
  StepResult end_update(const Update& update) const { return optimizer_.end_update(update); }
  void note_skip(const std::string& reason, std::vector<std::string> parameters,
                 int collapse_after) const {
    optimizer_.note_skip(reason, std::move(parameters), collapse_after);
  }

  // Of a capturable optimizer.
  StepResult step_on_device(const StepOptions& options, std::uint64_t scaler,
                            const TensorView& loss_scale) const {
    return optimizer_.step_on_device(options, scaler, loss_scale);
  }
  TensorView found_inf() const;  // f32 [1]: what the last step's check found
  /// Parameters whose gradients were not finite in a step since the last call; waits for the
  /// device.
  std::vector<std::string> take_overflowed() const;
  /// Before a replay: writes what the host has changed where the graph reads it (rates), and lets
  /// masters follow their weights.
  void prepare_replay() const;
  void note_replay() const;  // after it: the weights were written
  /// All that a captured step holds by value: where it differs, the step must be captured anew.
  void add_fingerprint(std::vector<std::uint64_t>& words) const;

 private:
  Optimizer& optimizer_;
};

/// Around a step of these optimizers: what other libraries' tensors that share the parameters'
/// memory have changed holds in it, and they follow what it has done, also where it throws.
class [[nodiscard]] SharedStep {
 public:
  explicit SharedStep(const std::vector<Optimizer*>& optimizers);
  ~SharedStep();
  SharedStep(const SharedStep&) = delete;
  SharedStep& operator=(const SharedStep&) = delete;

 private:
  std::vector<std::shared_ptr<GradientArena>> arenas_;
};

}  // namespace cairn::optim
