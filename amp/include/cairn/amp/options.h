// Opt levels and options of amp::initialize.
//
// | property            | O0  | O1      | O2      | O3   |
// |---------------------|-----|---------|---------|------|
// | cast_model_type     | f32 | -       | half    | half |
// | autocast            | no  | yes     | no      | no   |   (Apex: patch_torch_functions)
// | keep_batchnorm_fp32 | -   | -       | yes     | no   |
// | master_weights      | no  | -       | yes     | no   |
// | loss_scale          | 1   | dynamic | dynamic | 1    |   (bf16: 1 at every level)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/amp/loss_scaler.h"
#include "cairn/autograd/autocast.h"
#include "cairn/core/dtype.h"
#include "cairn/core/world.h"
#include "cairn/optim/optimizer.h"

namespace cairn::amp {

enum class OptLevel { O0, O1, O2, O3 };
/// "O0" ... "O3". Throws InvalidArgument that explains the letter O where a zero was typed.
OptLevel parse_opt_level(std::string_view text);
std::string_view name(OptLevel level);

struct Options {
  bool enabled = true;  // false: the model stays as it is, losses unscaled; steps are checked
  OptLevel opt_level = OptLevel::O1;
  DType half_dtype = DType::f16;  // or bf16

  // Overrides of the level's properties; unset: the level's default.
  std::optional<DType> cast_model_type;     // f32 or half_dtype; not at O1
  std::optional<bool> autocast;             // true at O1 only
  std::optional<bool> keep_batchnorm_fp32;  // O2, O3 (where the model is cast to half)
  std::optional<bool> master_weights;       // O2, O3 (where the model is cast to half)
  std::optional<DType> cast_model_outputs;  // unset: f32 where the model is cast, else as they come
  std::optional<double> loss_scale;         // a static scale
  bool dynamic_loss_scale = false;          // insists on dynamic where the level's default is 1
  /// O1: policies of single operations, by name, instead of their own (autograd::CastPolicyGuard).
  std::vector<std::pair<std::string, autograd::CastPolicy>> cast_policies;
  LossScalerOptions scaler;  // of dynamic scales; dynamic is resolved from the above

  int num_losses = 1;              // each has a scaler of its own: LossOptions::loss_id
  double max_gradient_norm = 0.0;  // clips in the update pass, where step() gets no other; 0: no

  /// How this rank reaches the others: DistributedDataParallel::world(). All ranks then step
  /// together, and an overflow names the rank that made it. Unset: one rank.
  World world;

  int overflow_history = 16;  // overflows that Amp::overflows() keeps
  /// Skipped steps in a row with the scale at its minimum (or static) that end in
  /// LossScaleCollapse; 0: never.
  int collapse_after = 50;
  /// Overflows in a row from one layer after which this layer runs in f32 from then on; 0: never.
  int fallback_after = 0;
};

/// Fills in the level's defaults. Throws InvalidArgument, naming both options, for a contradiction,
/// and for impossible values.
Options resolve(Options options);
/// Resolved options in one line, for people.
std::string describe(const Options& resolved);

}  // namespace cairn::amp
