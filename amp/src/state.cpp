// Saving and loading what amp holds.
#include "amp_impl.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"

namespace cairn::amp {

namespace {

const char* scale_kind(const Options& options) {
  return options.dynamic_loss_scale ? "dynamic" : "static";
}

std::string scaler_key(std::size_t id) {
  return "loss_scaler" + std::to_string(id);
}

/// The scalers of a state: of Cairn, of apex.amp, or the one of torch.amp.GradScaler.
std::vector<StateDict> scalers_in(const StateDict& state) {
  if (state.contains("_growth_tracker")) return {state};
  std::vector<StateDict> found;
  for (std::size_t id = 0; state.contains(scaler_key(id)); ++id) {
    found.push_back(state.dict(scaler_key(id)));
  }
  return found;
}

std::string text_or(const StateDict& state, const std::string& key, std::string_view other) {
  return state.contains(key) ? state.text(key) : std::string(other);
}

}  // namespace

StateDict Amp::apex_state_dict() const {
  StateDict state;
  for (std::size_t id = 0; id < impl_->losses.size(); ++id) {
    StateDict scaler = impl_->current_scaler(static_cast<int>(id), "amp").state_dict(), apex;
    apex.set("loss_scale", scaler.number("loss_scale"));
    apex.set("unskipped", scaler.integer("unskipped"));
    state.set(scaler_key(id), std::move(apex));
  }
  return state;
}

StateDict Amp::state_dict() const {
  const Options& options = impl_->options;
  StateDict state;
  state.set("opt_level", std::string(name(options.opt_level)));
  state.set("half_dtype", std::string(core::name(options.half_dtype)));
  state.set("loss_scale_kind", std::string(scale_kind(options)));
  for (std::size_t id = 0; id < impl_->losses.size(); ++id) {
    state.set(scaler_key(id), impl_->current_scaler(static_cast<int>(id), "amp").state_dict());
  }
  const std::vector<std::string> layers = fp32_layers();
  if (!layers.empty()) {
    StateDict& list = state.make_dict("fp32_layers");
    for (std::size_t i = 0; i < layers.size(); ++i) list.set(std::to_string(i), layers[i]);
  }
  return state;
}

void Amp::load_state_dict(const StateDict& state) {
  const Options& options = impl_->options;
  const std::vector<StateDict> scalers = scalers_in(state);
  if (scalers.size() != impl_->losses.size()) {
    core::fail<core::DataError>("amp", "expected the state of ", impl_->losses.size(),
                                " loss scalers, got ", scalers.size(),
                                " (amp::Options::num_losses; nothing was changed)");
  }
  const std::string level = text_or(state, "opt_level", name(options.opt_level));
  const std::string half = text_or(state, "half_dtype", core::name(options.half_dtype));
  const std::string kind = text_or(state, "loss_scale_kind", "dynamic");
  std::vector<LossScaler> loaded;
  for (std::size_t id = 0; id < scalers.size(); ++id) {
    loaded.push_back(impl_->current_scaler(static_cast<int>(id), "amp"));
    loaded.back().load_state_dict(scalers[id]);  // throws where it is damaged
  }
  impl_->contributions.reset();
  impl_->fallback.reset();
  for (Impl::Loss& loss : impl_->losses) loss = {std::move(loss.scaler)};
  if (state.contains("fp32_layers")) impl_->load_fp32_layers(state.dict("fp32_layers"));

  if (level != name(options.opt_level) || half != core::name(options.half_dtype)) {
    log::info("amp: a state of {} {} continues at {} {}", level, half, name(options.opt_level),
              options.half_dtype);
  }
  for (std::size_t id = 0; id < loaded.size(); ++id) {
    LossScaler& own = impl_->losses[id].scaler;
    if (options.dynamic_loss_scale && kind == "dynamic") {
      own = loaded[id];
    } else if (kind != scale_kind(options) || loaded[id].scale() != own.scale()) {
      log::info("amp: the loss scale stays {} ({}), the state has {} ({})", number(own.scale()),
                scale_kind(options), number(loaded[id].scale()), kind);
    }
  }
  impl_->write_scaler();
}

void Amp::Impl::load_fp32_layers(const StateDict& state) {
  for (const auto& [key, value] : state) {
    const std::string& layer = state.text(key);
    if (fallback.fall_back(layer)) continue;
    log::info(
        "amp: layer {} of the state ran in f32; fallback_after = 0 or the level has no half here, "
        "so it stays as it is",
        layer);
  }
  refresh_optimizers();
}

}  // namespace cairn::amp
