#include "cairn/kernels/update_scale.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

void update_scale(const TensorView& scale, const TensorView& growth_tracker,
                  const TensorView& hysteresis_tracker, const TensorView& found_inf,
                  const ScaleUpdateOptions& options, const TensorView& overflows) {
  constexpr auto kOp = "update_scale";
  const Named views[] = {{"scale", scale},
                         {"growth_tracker", growth_tracker},
                         {"hysteresis_tracker", hysteresis_tracker},
                         {"found_inf", found_inf}};
  check_device(kOp, {views[0], views[1], views[2], views[3]});
  const DType dtypes[] = {DType::f32, DType::i32, DType::i32, DType::f32};
  for (std::size_t i = 0; i < std::size(views); ++i) {
    check_dtype(kOp, views[i], dtypes[i]);
    CAIRN_CHECK(views[i].view.numel() == 1, kOp, "expected ", views[i].name,
                " of one element, got shape ", views[i].view.shape);
  }
  CAIRN_CHECK(options.growth_factor >= 1.0, kOp, "expected a growth_factor >= 1, got ",
              options.growth_factor);
  CAIRN_CHECK(options.backoff_factor > 0.0 && options.backoff_factor <= 1.0, kOp,
              "expected a backoff_factor in (0, 1], got ", options.backoff_factor);
  CAIRN_CHECK(options.growth_interval >= 1, kOp, "expected a growth_interval >= 1, got ",
              options.growth_interval);
  CAIRN_CHECK(options.hysteresis >= 1, kOp, "expected a hysteresis >= 1, got ", options.hysteresis);
  CAIRN_CHECK(options.min_scale >= 0.0 && options.min_scale <= options.max_scale, kOp,
              "expected 0 <= min_scale <= max_scale, got ", options.min_scale, " and ",
              options.max_scale);
  if (overflows.defined()) {
    check_device(kOp, {views[0], {"overflows", overflows}});
    check_dtype(kOp, {"overflows", overflows}, DType::i32);
    CAIRN_CHECK(overflows.numel() == 2 && overflows.is_contiguous(), kOp,
                "expected overflows of two elements, got shape ", overflows.shape);
  }
  wrote(scale, growth_tracker, hysteresis_tracker, overflows);
  launch(scale.device, [=](const Backend& backend) {
    backend.update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, overflows, options);
  });
}

}  // namespace cairn::kernels
