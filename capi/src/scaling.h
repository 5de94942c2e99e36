#pragma once

#include <memory>

#include "cairn/amp/scaled_step.h"
#include "optimizer.h"

namespace cairn::capi {

struct Scaler final : Object {
  explicit Scaler(const amp::LossScalerOptions& options) : scaler(options) {}

  amp::LossScaler scaler;
};

struct ScaledStep final : Object {
  ScaledStep(std::shared_ptr<Optimizer> rule, const amp::LossScalerOptions& options,
             std::shared_ptr<Ranks> of)
      : optimizer(std::move(rule)),
        ranks(std::move(of)),
        scaled(*optimizer->optimizer, options, world_of(ranks)) {}

  std::shared_ptr<Optimizer> optimizer;
  std::shared_ptr<Ranks> ranks;
  amp::ScaledStep scaled;
  optim::StepResult last;  // whose texts a cairn_step_result has
};

}  // namespace cairn::capi
