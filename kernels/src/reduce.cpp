#include "cairn/kernels/reduce.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

void reduce(ReductionKind op, const TensorView& x, const TensorView& y, bool accumulate) {
  check_device("reduce", {{"x", x}, {"y", y}});
  check_dims("reduce", {"y", y}, x.dims());
  for (int d = 0; d < x.dims(); ++d) {
    CAIRN_CHECK(y.shape[d] == x.shape[d] || y.shape[d] == 1, "reduce", "expected y of x's shape ",
                x.shape, " with 1 in the reduced dimensions, got ", y.shape);
  }
  const bool over_nothing = x.numel() == 0 && y.numel() > 0;
  CAIRN_CHECK(op != ReductionKind::max || !over_nothing, "reduce",
              "expected elements to take the maximum of, got x of shape ", x.shape);
  CAIRN_CHECK(op != ReductionKind::max || !accumulate, "reduce",
              "expected accumulate with sum or mean, got it with max");
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.reduce(op, x, y, accumulate); });
}

}  // namespace cairn::kernels
