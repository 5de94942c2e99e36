#include "cairn/kernels/loss.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

/// f32, or f64 for f64 inputs.
void check_loss_dtype(const char* op, const Named& v, DType input) {
  const bool fits =
      v.view.dtype == DType::f32 || (v.view.dtype == DType::f64 && input == DType::f64);
  CAIRN_CHECK(fits, op, "expected ", v.name, " of dtype f32", input == DType::f64 ? " or f64" : "",
              ", got ", core::name(v.view.dtype));
}

void check_logits(const char* op, const TensorView& logits, const TensorView& target,
                  const CrossEntropyOptions& options) {
  check_device(op, {{"logits", logits}, {"target", target}});
  check_floating(op, {{"logits", logits}});
  check_dims(op, {"logits", logits}, 2);
  check_dtype(op, {"target", target}, DType::i64);
  check_shape(op, {"target", target}, {logits.shape[0]});
  CAIRN_CHECK(options.label_smoothing >= 0.0 && options.label_smoothing <= 1.0, op,
              "expected label_smoothing in [0, 1], got ", options.label_smoothing);
}

/// A [N] f32 (f64) companion of the logits.
void check_per_row(const char* op, const Named& v, const TensorView& logits) {
  check_device(op, {{"logits", logits}, v});
  check_loss_dtype(op, v, logits.dtype);
  check_shape(op, v, {logits.shape[0]});
}

void check_pair(const char* op, const TensorView& x, const TensorView& target, const Named& loss) {
  check_device(op, {{"x", x}, {"target", target}, loss});
  check_floating(op, {{"x", x}});
  check_same_dtype(op, {{"x", x}, {"target", target}});
  check_same_shape(op, {{"x", x}, {"target", target}});
  check_loss_dtype(op, loss, x.dtype);
}

}  // namespace

void cross_entropy(const TensorView& logits, const TensorView& target, const TensorView& loss,
                   const TensorView& lse, const CrossEntropyOptions& options) {
  check_logits("cross_entropy", logits, target, options);
  check_per_row("cross_entropy", {"loss", loss}, logits);
  check_per_row("cross_entropy", {"lse", lse}, logits);
  wrote(loss, lse);
  launch(logits.device, [=](const Backend& backend) {
    backend.cross_entropy(logits, target, loss, lse, options);
  });
}

void cross_entropy_backward(const TensorView& logits, const TensorView& target,
                            const TensorView& lse, const TensorView& dloss,
                            const TensorView& dlogits, const CrossEntropyOptions& options,
                            std::optional<ClassSlice> slice) {
  const char* op = "cross_entropy_backward";
  check_logits(op, logits, target, options);
  check_per_row(op, {"lse", lse}, logits);
  check_per_row(op, {"dloss", dloss}, logits);
  check_device(op, {{"logits", logits}, {"dlogits", dlogits}});
  check_same_dtype(op, {{"logits", logits}, {"dlogits", dlogits}});
  check_same_shape(op, {{"logits", logits}, {"dlogits", dlogits}});
  const ClassSlice classes = slice.value_or(ClassSlice{0, logits.shape[1]});
  CAIRN_CHECK(classes.first >= 0 && classes.first + logits.shape[1] <= classes.all, op,
              "expected logits of classes among ", classes.all, ", got ", logits.shape[1],
              " from class ", classes.first);
  wrote(dlogits);
  launch(logits.device, [=](const Backend& backend) {
    backend.cross_entropy_backward(logits, target, lse, dloss, dlogits, options, classes);
  });
}

void mse(const TensorView& x, const TensorView& target, const TensorView& loss) {
  check_pair("mse", x, target, {"loss", loss});
  check_same_shape("mse", {{"x", x}, {"loss", loss}});
  wrote(loss);
  launch(x.device, [=](const Backend& backend) { backend.mse(x, target, loss); });
}

void mse_backward(const TensorView& x, const TensorView& target, const TensorView& dloss,
                  const TensorView& dx) {
  check_pair("mse_backward", x, target, {"dloss", dloss});
  check_device("mse_backward", {{"x", x}, {"dx", dx}});
  check_same_dtype("mse_backward", {{"x", x}, {"dx", dx}});
  check_same_shape("mse_backward", {{"x", x}, {"dx", dx}});
  const TensorView wide = broadcast_to("mse_backward", {"dloss", dloss}, x.shape);
  wrote(dx);
  launch(x.device, [=](const Backend& backend) { backend.mse_backward(x, target, wide, dx); });
}

void bce_with_logits(const TensorView& x, const TensorView& target, const TensorView& loss) {
  check_pair("bce_with_logits", x, target, {"loss", loss});
  check_same_shape("bce_with_logits", {{"x", x}, {"loss", loss}});
  wrote(loss);
  launch(x.device, [=](const Backend& backend) { backend.bce_with_logits(x, target, loss); });
}

void bce_with_logits_backward(const TensorView& x, const TensorView& target,
                              const TensorView& dloss, const TensorView& dx) {
  check_pair("bce_with_logits_backward", x, target, {"dloss", dloss});
  check_device("bce_with_logits_backward", {{"x", x}, {"dx", dx}});
  check_same_dtype("bce_with_logits_backward", {{"x", x}, {"dx", dx}});
  check_same_shape("bce_with_logits_backward", {{"x", x}, {"dx", dx}});
  const TensorView wide = broadcast_to("bce_with_logits_backward", {"dloss", dloss}, x.shape);
  wrote(dx);
  launch(x.device,
         [=](const Backend& backend) { backend.bce_with_logits_backward(x, target, wide, dx); });
}

void bce(const TensorView& p, const TensorView& target, const TensorView& loss) {
  check_pair("bce", p, target, {"loss", loss});
  check_same_shape("bce", {{"p", p}, {"loss", loss}});
  wrote(loss);
  launch(p.device, [=](const Backend& backend) { backend.bce(p, target, loss); });
}

void bce_backward(const TensorView& p, const TensorView& target, const TensorView& dloss,
                  const TensorView& dp) {
  check_pair("bce_backward", p, target, {"dloss", dloss});
  check_device("bce_backward", {{"p", p}, {"dp", dp}});
  check_same_dtype("bce_backward", {{"p", p}, {"dp", dp}});
  check_same_shape("bce_backward", {{"p", p}, {"dp", dp}});
  const TensorView wide = broadcast_to("bce_backward", {"dloss", dloss}, p.shape);
  wrote(dp);
  launch(p.device, [=](const Backend& backend) { backend.bce_backward(p, target, wide, dp); });
}

}  // namespace cairn::kernels
