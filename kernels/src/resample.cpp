#include "cairn/kernels/resample.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

void check_resampled(const char* op, const Named& image, const Named& resampled,
                     const ResampleOptions& options) {
  check_device(op, {image, resampled});
  check_dims(op, image, 4);
  check_dims(op, resampled, 4);
  check_floating(op, {image});
  check_same_dtype(op, {image, resampled});
  const Shape &from = image.view.shape, &to = resampled.view.shape;
  const bool sized = from[2] > 0 && from[3] > 0 && to[2] > 0 && to[3] > 0;
  CAIRN_CHECK(from[0] == to[0] && from[1] == to[1] && sized, op,
              "expected images [N, C, H, W] of the same N and C and at least one pixel, got ", from,
              " and ", to);
  CAIRN_CHECK(!options.align_corners || options.mode == ResampleMode::bilinear, op,
              "expected align_corners with bilinear alone, got another mode");
}

}  // namespace

void resample2d(const TensorView& x, const TensorView& y, const ResampleOptions& options) {
  check_resampled("resample2d", {"x", x}, {"y", y}, options);
  if (y.numel() == 0) return;
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.resample2d(x, y, options); });
}

void resample2d_backward(const TensorView& dy, const TensorView& dx,
                         const ResampleOptions& options) {
  check_resampled("resample2d_backward", {"dx", dx}, {"dy", dy}, options);
  if (dx.numel() == 0) return;
  wrote(dx);
  launch(dx.device, [=](const Backend& backend) { backend.resample2d_backward(dy, dx, options); });
}

}  // namespace cairn::kernels
