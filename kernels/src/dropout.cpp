#include "cairn/kernels/dropout.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

void dropout(const TensorView& x, double p, std::uint64_t seed, std::uint64_t offset,
             const TensorView& y) {
  dropout(x, p, core::RandomDraw{seed, offset}, y);
}

void dropout(const TensorView& x, double p, const core::RandomDraw& draw, const TensorView& y) {
  check_device("dropout", {{"x", x}, {"y", y}});
  check_floating("dropout", {{"x", x}});
  check_same_dtype("dropout", {{"x", x}, {"y", y}});
  const TensorView wide = broadcast_to("dropout", {"x", x}, y.shape);
  CAIRN_CHECK(p >= 0.0 && p <= 1.0, "dropout", "expected p in [0, 1], got ", p);
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.dropout(wide, p, draw, y); });
}

}  // namespace cairn::kernels
