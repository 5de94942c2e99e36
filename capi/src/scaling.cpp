#include "scaling.h"

#include "guard.h"

namespace cairn::capi {

namespace {

amp::LossScalerOptions scaler_options(const char* text, const char* function) {
  Options options(function, text);
  amp::LossScalerOptions own;
  options.read("dynamic", own.dynamic);
  options.read("init_scale", own.init_scale);
  options.read("growth_factor", own.growth_factor);
  options.read("backoff_factor", own.backoff_factor);
  options.read("growth_interval", own.growth_interval);
  options.read("min_scale", own.min_scale);
  options.read("max_scale", own.max_scale);
  options.read("hysteresis", own.hysteresis);
  options.read("consecutive_hysteresis", own.consecutive_hysteresis);
  options.end();
  return own;
}

std::shared_ptr<Scaler> scaler_of(const void* handle, const char* function) {
  return object_of<Scaler>(handle, function, "a scaler");
}

std::shared_ptr<ScaledStep> scaled_step_of(const void* handle, const char* function) {
  return object_of<ScaledStep>(handle, function, "a scaled step");
}

}  // namespace

extern "C" {

cairn_status cairn_scaler_create(const char* options, cairn_scaler** scaler) {
  return guard(__func__, [&](const char* function) {
    check_given(scaler, function, "where the scaler goes");
    *scaler = static_cast<cairn_scaler*>(
        add_object(std::make_shared<Scaler>(scaler_options(options, function))));
  });
}

cairn_status cairn_scaler_scale(cairn_scaler* scaler, double* scale) {
  return guard(__func__, [&](const char* function) {
    const auto own = scaler_of(scaler, function);
    check_given(scale, function, "where the scale goes");
    *scale = own->scaler.scale();
  });
}

cairn_status cairn_scaler_update(cairn_scaler* scaler, int32_t overflow) {
  return guard(__func__, [&](const char* function) {
    const auto own = scaler_of(scaler, function);
    CAIRN_CHECK(overflow == 0 || overflow == 1, function, "expected an overflow of 0 or 1, got ",
                overflow);
    own->scaler.update(overflow == 1);
  });
}

cairn_status cairn_scaled_step_create(cairn_optimizer* optimizer, const char* options, void* world,
                                      cairn_scaled_step** scaled) {
  return guard(__func__, [&](const char* function) {
    check_given(scaled, function, "where the scaled step goes");
    *scaled = static_cast<cairn_scaled_step*>(add_object(std::make_shared<ScaledStep>(
        optimizer_of(optimizer, function), scaler_options(options, function),
        ranks_of(world, function))));
  });
}

cairn_status cairn_scaled_step_scale(cairn_scaled_step* scaled, double* scale) {
  return guard(__func__, [&](const char* function) {
    const auto own = scaled_step_of(scaled, function);
    check_given(scale, function, "where the scale goes");
    *scale = own->scaled.scale();
  });
}

cairn_status cairn_scaled_step_run(cairn_scaled_step* scaled, const char* options,
                                   cairn_step_result* result) {
  return guard(__func__, [&](const char* function) {
    const auto own = scaled_step_of(scaled, function);
    check_given(result, function, "a result (a skipped step shows there alone)");
    own->last = own->scaled.step(step_options(options, function));
    *result = step_result(own->last);
  });
}

}  // extern "C"

}  // namespace cairn::capi
