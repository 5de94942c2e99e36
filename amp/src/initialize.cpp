#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
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

StatesOfParameters states_of(const std::vector<optim::Optimizer*>& optimizers,
                             const Options& options) {
  StatesOfParameters states;
  const bool remainders =
      !options.master_weights.value_or(false) || options.half_dtype == DType::bf16;
  for (const optim::Optimizer* optimizer : optimizers) {
    const optim::MasterStorage masters = optimizer->state_options().masters;
    CAIRN_CHECK(remainders || masters != optim::MasterStorage::remainder, "initialize",
                "expected half_dtype bf16 for masters kept as remainders, got ", options.half_dtype,
                " (set_state_options({.masters = MasterStorage::f32}))");
    for (const optim::ParameterGroup& group : optimizer->groups()) {
      for (const auto& [name, tensor] : group.parameters) {
        CAIRN_CHECK(states.emplace(tensor.id(), optimizer->state_options()).second, "initialize",
                    "expected parameters of one optimizer each, got '", name, "' in two");
      }
    }
  }
  return states;
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
  std::optional<Device> last;
  for (nn::Module* model : models) {
    for (const NamedTensor& parameter : model->parameters()) {
      const Device device = parameter.tensor.device();
      if (std::exchange(last, device) != device) core::release_cached_memory(device);
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
  const StatesOfParameters states = states_of(optimizers, resolved);
  for (const nn::Module* model : models) {
    if (resolved.enabled) check_model(*model);
  }
  check_same_options(resolved);
  auto impl = std::make_shared<Amp::Impl>(resolved, models, optimizers);
  for (nn::Module* model : models) {
    if (resolved.enabled) cast_model(*model, resolved, states, impl->fallback.any());
  }
  for (optim::Optimizer* optimizer : optimizers) {
    if (resolved.master_weights) optimizer->set_master_weights(*resolved.master_weights);
    if (resolved.enabled) optim::OptimizerAccess(*optimizer).refresh();
  }
  if (resolved.cast_model_type) release_former_weights(models);
  log::info("amp: {}", describe(resolved));
  return Amp(std::move(impl));
}

Amp initialize(nn::Module& model, optim::Optimizer& optimizer, const Options& options) {
  return initialize({&model}, {&optimizer}, options);
}

}  // namespace cairn::amp
