#include <cmath>

#include "cairn/amp/amp.h"
#include "cairn/core/error.h"
#include "number.h"

namespace cairn::amp {

namespace {

bool casts_model(OptLevel level) {
  return level == OptLevel::O2 || level == OptLevel::O3;
}

const char* on_off(bool value) {
  return value ? "true" : "false";
}

void check_values(const Options& o) {
  CAIRN_CHECK(core::is_half(o.half_dtype), "amp", "expected half_dtype f16 or bf16, got ",
              o.half_dtype);
  CAIRN_CHECK(!o.loss_scale || (std::isfinite(*o.loss_scale) && *o.loss_scale > 0), "amp",
              "expected a finite loss_scale > 0, got ", o.loss_scale.value_or(0));
  CAIRN_CHECK(std::isfinite(o.max_gradient_norm) && o.max_gradient_norm >= 0, "amp",
              "expected max_gradient_norm >= 0, got ", o.max_gradient_norm);
  CAIRN_CHECK(o.accumulation_steps >= 1, "amp", "expected accumulation_steps >= 1, got ",
              o.accumulation_steps);
}

void check_contradictions(const Options& o) {
  const bool casts = casts_model(o.opt_level);
  CAIRN_CHECK(
      casts || !o.keep_batchnorm_fp32, "amp", "expected keep_batchnorm_fp32 with O2 or O3, ",
      "got keep_batchnorm_fp32 = ", on_off(o.keep_batchnorm_fp32.value_or(false)),
      " with opt_level ", name(o.opt_level), " (its model stays f32 as a whole: leave it unset)");
  CAIRN_CHECK(casts || !o.master_weights, "amp", "expected master_weights with O2 or O3, ",
              "got master_weights = ", on_off(o.master_weights.value_or(false)), " with opt_level ",
              name(o.opt_level), " (its weights are f32 already: leave it unset)");
  CAIRN_CHECK(!(o.loss_scale && o.dynamic_loss_scale), "amp",
              "expected loss_scale or dynamic_loss_scale, got loss_scale = ",
              number(o.loss_scale.value_or(0)),
              " and dynamic_loss_scale = true (set scaler.init_scale to start a dynamic scale)");
  CAIRN_CHECK(
      o.scaler.dynamic || !o.dynamic_loss_scale, "amp",
      "expected one kind of scale, got dynamic_loss_scale = true and scaler.dynamic = false");
}

}  // namespace

std::string number(double value) {
  if (value == std::floor(value) && std::abs(value) < 0x1p53) {
    return std::to_string(static_cast<long long>(value));
  }
  return core::str(value);
}

OptLevel parse_opt_level(std::string_view text) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    if (text == name(level)) return level;
  }
  const bool zero = text.size() == 2 && text[0] == '0' && text[1] >= '0' && text[1] <= '3';
  const bool lower = text.size() == 2 && text[0] == 'o' && text[1] >= '0' && text[1] <= '3';
  core::fail("opt_level", "expected O0, O1, O2 or O3, got '", text, "'",
             zero    ? " (the first character is the letter O, not the digit zero)"
             : lower ? " (the letter O is a capital)"
                     : " (the letter O and a digit)");
}

std::string_view name(OptLevel level) {
  switch (level) {
    case OptLevel::O0:
      return "O0";
    case OptLevel::O1:
      return "O1";
    case OptLevel::O2:
      return "O2";
    case OptLevel::O3:
      return "O3";
  }
  core::fail("opt_level", "expected O0 to O3, got ", static_cast<int>(level));
}

Options resolve(Options o) {
  check_values(o);
  check_contradictions(o);
  if (casts_model(o.opt_level)) {
    const bool o2 = o.opt_level == OptLevel::O2;
    o.keep_batchnorm_fp32 = o.keep_batchnorm_fp32.value_or(o2);
    o.master_weights = o.master_weights.value_or(o2);
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

std::string describe(const Options& o) {
  const std::string half(core::name(o.half_dtype));
  std::string text = core::str("opt level ", name(o.opt_level), ": model ");
  text += casts_model(o.opt_level) ? half : "f32";
  if (o.opt_level == OptLevel::O1) text += ", autocast " + half;
  if (o.keep_batchnorm_fp32) {
    text += ", batch norm " + (*o.keep_batchnorm_fp32 ? std::string("f32") : half);
  }
  if (o.master_weights) text += *o.master_weights ? ", f32 masters" : ", no masters";
  if (o.dynamic_loss_scale) {
    const LossScalerOptions& s = o.scaler;
    text += ", dynamic loss scale from " + number(s.init_scale) + " (times " +
            number(s.backoff_factor) + " on overflow, " + number(s.growth_factor) + " after " +
            number(static_cast<double>(s.growth_interval)) + " steps, within " +
            number(s.min_scale) + " and " + number(s.max_scale) + ")";
  } else {
    text += ", loss scale " + number(o.loss_scale.value_or(1.0));
  }
  if (o.max_gradient_norm > 0) text += ", clipped at norm " + number(o.max_gradient_norm);
  if (o.accumulation_steps > 1) text += core::str(", ", o.accumulation_steps, " backwards a step");
  return text;
}

}  // namespace cairn::amp
