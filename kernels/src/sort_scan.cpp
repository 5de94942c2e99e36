#include "cairn/kernels/sort_scan.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

void topk(const TensorView& x, const TensorView& index, bool largest) {
  check_device("topk", {{"x", x}, {"index", index}});
  check_dims("topk", {"x", x}, 2);
  check_dims("topk", {"index", index}, 2);
  check_dtype("topk", {"index", index}, DType::i64);
  const bool fits = index.size(0) == x.size(0) && index.size(1) <= x.size(1);
  CAIRN_CHECK(fits, "topk", "expected x [N, V] and index [N, K] with K <= V, got ", x.shape,
              " and ", index.shape);
  if (index.numel() == 0) return;
  wrote(index);
  launch(x.device, [=](const Backend& backend) { backend.topk(x, index, largest); });
}

void cumsum(const TensorView& x, const TensorView& y, bool reverse) {
  check_device("cumsum", {{"x", x}, {"y", y}});
  check_floating("cumsum", {{"x", x}});
  check_same_dtype("cumsum", {{"x", x}, {"y", y}});
  check_same_shape("cumsum", {{"x", x}, {"y", y}});
  CAIRN_CHECK(x.dims() >= 1, "cumsum", "expected x [..., L], got ", x.shape);
  if (x.numel() == 0) return;
  wrote(y);
  launch(x.device, [=](const Backend& backend) { backend.cumsum(x, y, reverse); });
}

}  // namespace cairn::kernels
