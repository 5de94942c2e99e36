// Makes the ranks start from one model.
#pragma once

#include <optional>
#include <string>

#include "cairn/nn/module.h"
#include "cairn/parallel/sharded.h"

namespace cairn::parallel {

/// Throws InvalidArgument, on every rank, naming the first parameter or buffer whose name, dtype or
/// shape differs between ranks. losses: of_losses(), where a backward asks.
void check_same_model(const nn::Module& model, const ProcessGroup& group,
                      const std::string& losses = {});
/// The same, and of these options; of a ShardedDataParallel with its stage.
void check_same_options_and_model(const ShardedOptions& options, std::optional<ZeroStage> stage,
                                  const nn::Module& model, const ProcessGroup& group);
/// Gives every rank rank 0's values of these parameters and their f32 masters.
void broadcast_weights(const NamedTensors& parameters, const ProcessGroup& group);

}  // namespace cairn::parallel
