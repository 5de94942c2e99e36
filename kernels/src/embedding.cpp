#include "cairn/kernels/embedding.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

void embedding(const TensorView& weight, const TensorView& index, const TensorView& y) {
  check_device("embedding", {{"weight", weight}, {"index", index}, {"y", y}});
  check_dims("embedding", {"weight", weight}, 2);
  check_dims("embedding", {"index", index}, 1);
  check_dtype("embedding", {"index", index}, DType::i64);
  check_same_dtype("embedding", {{"weight", weight}, {"y", y}});
  check_shape("embedding", {"y", y}, {index.shape[0], weight.shape[1]});
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.embedding(weight, index, y); });
}

void embedding_backward(const TensorView& dy, const TensorView& index, const TensorView& dweight,
                        bool accumulate) {
  check_device("embedding_backward", {{"dy", dy}, {"index", index}, {"dweight", dweight}});
  check_floating("embedding_backward", {{"dy", dy}, {"dweight", dweight}});
  check_dims("embedding_backward", {"dweight", dweight}, 2);
  check_dims("embedding_backward", {"index", index}, 1);
  check_dtype("embedding_backward", {"index", index}, DType::i64);
  check_shape("embedding_backward", {"dy", dy}, {index.shape[0], dweight.shape[1]});
  wrote(dweight);
  launch(dy.device, [=](const Backend& backend) {
    backend.embedding_backward(dy, index, dweight, accumulate);
  });
}

}  // namespace cairn::kernels
