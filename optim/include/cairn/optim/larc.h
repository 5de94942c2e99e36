// LARC: layer-wise adaptive rate clipping, around any optimizer (You, Gitman & Ginsburg 2017;
// apex.parallel.LARC).
//
//   optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1, .momentum = 0.9});
//   optim::LARC larc(optimizer, {.trust_coefficient = 0.02});
//   amp::Amp precision = amp::initialize(model, optimizer);   // as without LARC
//
// While the LARC lives, every step of the optimizer multiplies each parameter's gradient, with its
// weight decay in it, by
//   a = trust_coefficient |w| / (|g| + weight_decay |w| + eps);   clip: a = min(a / lr, 1)
//   g = (g + weight_decay w) a
// where |w| and |g| are the 2-norms of the parameter (of its master; of the bf16 weight, where the
// rest is kept as a remainder) and of its gradient (unscaled, clipped); a parameter where either is
// 0 keeps its gradient, without weight decay. Norms come from the check pass: the host still waits
// once a step.
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct LarcOptions {
  double trust_coefficient = 0.02;
  bool clip = true;  // LARC: at most the optimizer's learning rate; false: LARS, which scales it
  double eps = 1e-8;
};

class LARC {
 public:
  /// The optimizer must outlive it and stay where it is. Throws InvalidArgument for impossible
  /// options, an optimizer with a LARC already, and for one whose rule looks at gradient norms
  /// itself (FusedNovoGrad, FusedLAMB that clips).
  explicit LARC(Optimizer& optimizer, const LarcOptions& options = {});
  ~LARC();
  LARC(const LARC&) = delete;
  LARC& operator=(const LARC&) = delete;

  Optimizer& optimizer() const { return *optimizer_; }
  const LarcOptions& options() const;
  StepResult step(const StepOptions& options = {}) { return optimizer_->step(options); }

 private:
  Optimizer* optimizer_;
};

}  // namespace cairn::optim
