#include "cairn/kernels/softmax.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

void check_dims(const char* op, const TensorView& x, const SoftmaxOptions& options) {
  const bool lengths = options.lengths.defined();
  const int least = options.causal || lengths ? 2 : 1;
  CAIRN_CHECK(x.dims() >= least, op, "expected at least ", least, " dimensions",
              options.causal ? " (causal)"
              : lengths      ? " (lengths)"
                             : "",
              ", got shape ", x.shape);
  check_lengths(op, {"x", x}, {"lengths", options.lengths}, lengths ? x.size(0) : 0);
}

}  // namespace

void softmax(const TensorView& x, const TensorView& y, const SoftmaxOptions& options) {
  check_device("softmax", {{"x", x}, {"y", y}});
  check_floating("softmax", {{"x", x}});
  check_same_dtype("softmax", {{"x", x}, {"y", y}});
  check_same_shape("softmax", {{"x", x}, {"y", y}});
  check_dims("softmax", x, options);
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.softmax(x, y, options); });
}

void softmax_backward(const TensorView& y, const TensorView& dy, const TensorView& dx,
                      const SoftmaxOptions& options) {
  check_device("softmax_backward", {{"y", y}, {"dy", dy}, {"dx", dx}});
  check_floating("softmax_backward", {{"y", y}});
  check_same_dtype("softmax_backward", {{"y", y}, {"dy", dy}, {"dx", dx}});
  check_same_shape("softmax_backward", {{"y", y}, {"dx", dx}});
  check_dims("softmax_backward", y, options);
  const TensorView wide_dy = broadcast_to("softmax_backward", {"dy", dy}, y.shape);
  wrote(dx);
  launch(y.device,
         [=](const Backend& backend) { backend.softmax_backward(y, wide_dy, dx, options); });
}

}  // namespace cairn::kernels
