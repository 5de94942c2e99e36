#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "amp_impl.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"

namespace cairn::amp {

namespace {

template <class T>
void check_list(const char* kind, const std::vector<T*>& list) {
  std::unordered_set<const T*> seen;
  for (const T* item : list) {
    CAIRN_CHECK(item != nullptr, "initialize", "expected a ", kind, ", got a null pointer");
    CAIRN_CHECK(seen.insert(item).second, "initialize", "expected each ", kind,
                " once, got one twice");
  }
}

void check_one_optimizer_each(const std::vector<optim::Optimizer*>& optimizers) {
  std::unordered_set<const void*> seen;
  for (const optim::Optimizer* optimizer : optimizers) {
    for (const optim::ParameterGroup& group : optimizer->groups()) {
      for (const auto& [name, tensor] : group.parameters) {
        CAIRN_CHECK(seen.insert(tensor.id()).second, "initialize",
                    "expected parameters of one optimizer each, got '", name, "' in two");
      }
    }
  }
}

/// Before anything is cast.
void check_masters(const std::vector<optim::Optimizer*>& optimizers, const Options& options) {
  if (!options.master_weights.value_or(false)) return;
  for (const optim::Optimizer* optimizer : optimizers) {
    CAIRN_CHECK(optimizer->state_options().masters != optim::MasterStorage::remainder ||
                    options.half_dtype == DType::bf16,
                "initialize", "expected half_dtype bf16 for masters kept as remainders, got ",
                options.half_dtype, " (set_state_options({.masters = MasterStorage::f32}))");
  }
}

/// Ranks that scale or skip by other rules would part without a word, at the latest where a step's
/// gradients go unchecked.
void check_same_options(const Options& resolved) {
  const World& world = resolved.world;
  if (world.size == 1) return;
  const LossScalerOptions& scaler = resolved.scaler;
  const std::string own = core::str(describe(resolved), "; hysteresis ", scaler.hysteresis,
                                    scaler.consecutive_hysteresis ? " in a row" : "",
                                    ", collapse after ", resolved.collapse_after);
  const std::vector<std::string> all = world.exchange(own, "amp's options");
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    CAIRN_CHECK(all[rank] == all[0], "initialize", "expected the same options on every rank, got '",
                all[0], "' on rank 0 and '", all[rank], "' on rank ", rank);
  }
}

/// The f32 weights that the cast replaced lie in the allocator's cache, and few later requests have
/// their sizes.
void release_former_weights(const std::vector<nn::Module*>& models) {
  std::vector<Device> released;
  for (nn::Module* model : models) {
    for (const NamedTensor& parameter : model->parameters()) {
      const Device device = parameter.tensor.device();
      if (std::find(released.begin(), released.end(), device) != released.end()) continue;
      core::release_cached_memory(device);
      released.push_back(device);
    }
  }
}

}  // namespace

Amp initialize(const std::vector<nn::Module*>& models,
               const std::vector<optim::Optimizer*>& optimizers, const Options& options) {
  const Options resolved = resolve(options);
  const LossScaler checks_its_options(resolved.scaler);
  check_list("model", models);
  check_list("optimizer", optimizers);
  check_one_optimizer_each(optimizers);
  for (const nn::Module* model : models) {
    if (resolved.enabled) check_model(*model);
  }
  check_masters(optimizers, resolved);
  check_same_options(resolved);
  auto impl = std::make_shared<Amp::Impl>(resolved, models, optimizers);
  for (optim::Optimizer* optimizer : optimizers) {
    if (resolved.master_weights) optimizer->set_master_weights(*resolved.master_weights);
    if (resolved.enabled) optim::OptimizerAccess(*optimizer).refresh();
  }
  if (resolved.enabled && resolved.cast_model_type) release_former_weights(models);
  log::info("amp: {}", describe(resolved));
  return Amp(std::move(impl));
}

Amp initialize(nn::Module& model, optim::Optimizer& optimizer, const Options& options) {
  return initialize({&model}, {&optimizer}, options);
}

}  // namespace cairn::amp
