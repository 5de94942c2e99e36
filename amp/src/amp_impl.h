#pragma once

#include "cairn/amp/amp.h"

namespace cairn::amp {

struct Amp::Impl {
  Options options;  // resolved
  optim::Optimizer* optimizer;
  LossScaler scaler;
};

}  // namespace cairn::amp
