// What amp needs of an optimizer beyond what a trainer uses: the parts of a step between which it
// decides. Each says in optimizer.h what it does. Not for trainers: it may change with any version.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

class OptimizerAccess {
 public:
  explicit OptimizerAccess(Optimizer& optimizer) : optimizer_(optimizer) {}

  PendingReport begin_own_check(double norm_type) const {
    return optimizer_.begin_own_check(norm_type);
  }
  void prepare() const { optimizer_.prepare(); }
  void wait_for_reductions() const { optimizer_.wait_for_reductions(); }
  void check_scaler(std::uint64_t scaler) const { optimizer_.check_scaler(scaler); }

  // Of a capturable optimizer.
  StepResult step_on_device(const StepOptions& options, const TensorView& loss_scale) const {
    return optimizer_.step_on_device(options, loss_scale);
  }
  TensorView found_inf() const { return optimizer_.found_inf(); }
  std::vector<std::string> take_overflowed() const { return optimizer_.take_overflowed(); }
  void prepare_replay() const { optimizer_.prepare_replay(); }
  void note_replay() const { optimizer_.note_replay(); }
  void add_fingerprint(std::vector<std::uint64_t>& words) const {
    optimizer_.add_fingerprint(words);
  }

 private:
  Optimizer& optimizer_;
};

}  // namespace cairn::optim
