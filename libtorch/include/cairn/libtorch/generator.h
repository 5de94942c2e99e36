// libtorch's random generators as a part of a training state.
//
//   libtorch::Generators generators;
//   checkpointing::TrainingState state({{"model", model}, {"random", generators}}, model.world());
//
// Those that dropout and initialisers draw from: the CPU's default generator and, where libtorch
// has GPUs, each GPU's.
#pragma once

#include "cairn/core/state_dict.h"

namespace cairn::libtorch {

class Generators : public core::Stateful {
 public:
  /// "cpu", "cuda0" ...: u8 tensors, as torch.get_rng_state() gives them.
  StateDict state_dict() const override;
  /// Throws DataError, before anything changes, where one is missing or damaged.
  void load_state_dict(const StateDict& state) override;
};

}  // namespace cairn::libtorch
