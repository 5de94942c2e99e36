#include <cmath>

#include "cairn/amp/options.h"

#include "cairn/core/error.h"
#include "overflow_agreement.h"

namespace cairn::amp {

namespace {

void check_values(const Options& o) {
  CAIRN_CHECK(core::is_half(o.half_dtype), "amp", "expected half_dtype f16 or bf16, got ",
              o.half_dtype);
  CAIRN_CHECK(!o.loss_scale || (std::isfinite(*o.loss_scale) && *o.loss_scale > 0), "amp",
              "expected a finite loss_scale > 0, got ", o.loss_scale.value_or(0));
  CAIRN_CHECK(std::isfinite(o.max_gradient_norm) && o.max_gradient_norm >= 0, "amp",
              "expected max_gradient_norm >= 0, got ", o.max_gradient_norm);
  CAIRN_CHECK(o.num_losses >= 1, "amp", "expected num_losses >= 1, got ", o.num_losses);
  CAIRN_CHECK(o.overflow_history >= 0 && o.collapse_after >= 0 && o.fallback_after >= 0, "amp",
              "expected overflow_history, collapse_after and fallback_after >= 0, got ",
              o.overflow_history, ", ", o.collapse_after, " and ", o.fallback_after);
  CAIRN_CHECK(!o.cast_model_outputs || core::is_floating(*o.cast_model_outputs), "amp",
              "expected a floating cast_model_outputs, got ",
              o.cast_model_outputs.value_or(DType::i64));
}

void check_contradictions(const Options& o) {
  const bool o1 = o.opt_level == OptLevel::O1;
  const DType cast = o.cast_model_type.value_or(DType::f32);
  CAIRN_CHECK(cast == DType::f32 || !o1, "amp",
              "expected cast_model_type f32 or none with O1, got ", cast,
              " (its model stays f32 and operations cast: O2 and O3 cast the model)");
  CAIRN_CHECK(cast == DType::f32 || cast == o.half_dtype, "amp",
              "expected cast_model_type f32 or half_dtype, got cast_model_type = ", cast,
              " and half_dtype = ", o.half_dtype);
  CAIRN_CHECK(o1 || !o.autocast.value_or(false), "amp", "expected autocast with O1, got ",
              "autocast = true with opt_level ", name(o.opt_level),
              " (O1 is the level whose operations cast)");
  CAIRN_CHECK(o1 || o.cast_policies.empty(), "amp", "expected cast_policies with O1, got one for '",
              o.cast_policies.front().first, "' with opt_level ", name(o.opt_level),
              " (no other level casts by operation)");
  autograd::CastPolicies known;
  for (const auto& [op, policy] : o.cast_policies) known.set(op, policy);  // throws for a stranger
  const auto unset = [o1](const char* what, std::optional<bool> value, const char* why) {
    CAIRN_CHECK(!o1 || !value, "amp", "expected no ", what, " with O1, got ", what, " = ",
                *value ? "true" : "false", " with opt_level O1 (", why, ": leave it unset)");
  };
  unset("keep_batchnorm_fp32", o.keep_batchnorm_fp32, "its model stays f32 as a whole");
  unset("master_weights", o.master_weights, "its weights are f32 already");
  CAIRN_CHECK(!(o.loss_scale && o.dynamic_loss_scale), "amp",
              "expected loss_scale or dynamic_loss_scale, got loss_scale = ",
              number(o.loss_scale.value_or(0)),
              " and dynamic_loss_scale = true (set scaler.init_scale to start a dynamic scale)");
  CAIRN_CHECK(
      o.scaler.dynamic || !o.dynamic_loss_scale, "amp",
      "expected one kind of scale, got dynamic_loss_scale = true and scaler.dynamic = false");
}

/// What is left of the options where amp does nothing.
Options disabled(Options o) {
  o.opt_level = OptLevel::O0;
  o.cast_model_type = o.cast_model_outputs = std::nullopt;
  o.autocast = o.keep_batchnorm_fp32 = o.master_weights = std::nullopt;
  o.dynamic_loss_scale = o.scaler.dynamic = false;
  o.loss_scale = o.scaler.init_scale = 1.0;
  o.fallback_after = 0;
  o.cast_policies.clear();
  return o;
}

}  // namespace

OptLevel parse_opt_level(std::string_view text) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    if (text == name(level)) return level;
  }
  const char first = text.size() == 2 && text[1] >= '0' && text[1] <= '3' ? text[0] : ' ';
  core::fail("opt_level", "expected O0, O1, O2 or O3, got '", text, "'",
             first == '0'   ? " (the first character is the letter O, not the digit zero)"
             : first == 'o' ? " (the letter O is a capital)"
                            : " (the letter O and a digit)");
}

std::string_view name(OptLevel level) {
  constexpr std::string_view kNames[] = {"O0", "O1", "O2", "O3"};
  const int index = static_cast<int>(level);
  CAIRN_CHECK(index >= 0 && index < 4, "opt_level", "expected O0 to O3, got ", index);
  return kNames[index];
}

Options resolve(Options o) {
  check_values(o);
  check_contradictions(o);
  if (!o.enabled) return disabled(std::move(o));
  const bool o2 = o.opt_level == OptLevel::O2;
  if (o.opt_level == OptLevel::O1) {
    o.cast_model_type = std::nullopt;
    o.autocast = o.autocast.value_or(true);
  } else {
    const DType by_level = o.opt_level == OptLevel::O0 ? DType::f32 : o.half_dtype;
    o.cast_model_type = o.cast_model_type.value_or(by_level);
  }
  if (core::is_half(o.cast_model_type.value_or(DType::f32))) {
    o.keep_batchnorm_fp32 = o.keep_batchnorm_fp32.value_or(o2);
    o.master_weights = o.master_weights.value_or(o2);
    o.cast_model_outputs = o.cast_model_outputs.value_or(DType::f32);
  }
  const bool scales = o.opt_level == OptLevel::O1 || o.opt_level == OptLevel::O2;
  const bool dynamic_by_default = scales && o.half_dtype == DType::f16 && o.scaler.dynamic;
  o.dynamic_loss_scale = o.dynamic_loss_scale || (dynamic_by_default && !o.loss_scale);
  if (!o.dynamic_loss_scale) {
    const double by_default = o.scaler.dynamic ? 1.0 : o.scaler.init_scale;
    o.loss_scale = o.loss_scale.value_or(by_default);
    o.scaler.init_scale = *o.loss_scale;
  }
  o.scaler.dynamic = o.dynamic_loss_scale;
  return o;
}

namespace {

std::string describe_enabled(const Options& o) {
  const DType model = o.cast_model_type.value_or(DType::f32);
  const std::string half(core::name(o.half_dtype));
  std::string text = core::str("opt level ", name(o.opt_level), ": model ", model);
  if (o.autocast.value_or(false)) text += ", autocast " + half;
  for (std::size_t i = 0; i < o.cast_policies.size(); ++i) {
    const auto& [operation, policy] = o.cast_policies[i];
    text += core::str(i == 0 ? " but for " : ", ", operation, " (", autograd::name(policy), ")");
  }
  if (core::is_half(model)) {
    text += ", batch norm " + (*o.keep_batchnorm_fp32 ? std::string("f32") : half);
    text += *o.master_weights ? ", f32 masters" : ", no masters";
  }
  if (o.cast_model_outputs.value_or(DType::f32) != DType::f32) {
    text += core::str(", outputs ", *o.cast_model_outputs);
  }
  if (o.num_losses > 1) text += core::str(", ", o.num_losses, " losses");
  if (o.dynamic_loss_scale) {
    const LossScalerOptions& s = o.scaler;
    text += ", dynamic loss scale from " + number(s.init_scale) + " (times " +
            number(s.backoff_factor) + " on overflow, " + number(s.growth_factor) + " after " +
            number(static_cast<double>(s.growth_interval)) + " steps, within " +
            number(s.min_scale) + " and " + number(s.max_scale) + ")";
  } else {
    text += ", loss scale " + number(o.loss_scale.value_or(1.0));
  }
  if (o.fallback_after > 0) {
    text += core::str(", layers fall back to f32 after ", o.fallback_after, " overflows in a row");
  }
  return text;
}

}  // namespace

std::string describe(const Options& o) {
  std::string text = o.enabled ? describe_enabled(o) : "disabled: the model as it is, loss scale 1";
  if (o.max_gradient_norm > 0) text += ", clipped at norm " + number(o.max_gradient_norm);
  return text;
}

}  // namespace cairn::amp
