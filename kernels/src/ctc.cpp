#include "cairn/kernels/ctc.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

void check_ctc(const char* op, const TensorView& log_probs, const CtcTargets& t,
               const TensorView& loss, const TensorView& alpha) {
  check_device(op, {{"log_probs", log_probs},
                    {"targets", t.targets},
                    {"input_lengths", t.input_lengths},
                    {"target_lengths", t.target_lengths},
                    {"loss", loss},
                    {"alpha", alpha}});
  check_dims(op, {"log_probs", log_probs}, 3);
  check_dims(op, {"targets", t.targets}, 2);
  const bool wide = log_probs.dtype == DType::f32 || log_probs.dtype == DType::f64;
  CAIRN_CHECK(wide, op, "expected log_probs of f32 or f64, got ", log_probs.dtype);
  check_same_dtype(op, {{"log_probs", log_probs}, {"loss", loss}, {"alpha", alpha}});
  const std::int64_t T = log_probs.size(0), N = log_probs.size(1), C = log_probs.size(2);
  for (const Named& integers :
       {Named{"targets", t.targets}, Named{"input_lengths", t.input_lengths},
        Named{"target_lengths", t.target_lengths}}) {
    check_dtype(op, integers, DType::i64);
  }
  check_shape(op, {"targets", t.targets}, {N, t.targets.size(1)});
  check_shape(op, {"input_lengths", t.input_lengths}, {N});
  check_shape(op, {"target_lengths", t.target_lengths}, {N});
  check_shape(op, {"loss", loss}, {N});
  check_shape(op, {"alpha", alpha}, {N, T, 2 * t.targets.size(1) + 1});
  CAIRN_CHECK(t.blank >= 0 && t.blank < C, op, "expected blank in 0..", C - 1, ", got ", t.blank);
  for (const TensorView* view :
       {&log_probs, &t.targets, &t.input_lengths, &t.target_lengths, &loss, &alpha}) {
    CAIRN_CHECK(view->is_contiguous(), op, "expected contiguous views, got strides for shape ",
                view->shape);
  }
}

}  // namespace

void ctc_loss(const TensorView& log_probs, const CtcTargets& targets, const TensorView& loss,
              const TensorView& alpha) {
  check_ctc("ctc_loss", log_probs, targets, loss, alpha);
  if (loss.numel() == 0) return;
  wrote(loss, alpha);
  launch(loss.device,
         [=](const Backend& backend) { backend.ctc_loss(log_probs, targets, loss, alpha); });
}

void ctc_loss_backward(const TensorView& log_probs, const CtcTargets& targets,
                       const TensorView& loss, const TensorView& alpha, const TensorView& dloss,
                       const TensorView& dlog_probs) {
  check_ctc("ctc_loss_backward", log_probs, targets, loss, alpha);
  check_device("ctc_loss_backward",
               {{"log_probs", log_probs}, {"dloss", dloss}, {"dlog_probs", dlog_probs}});
  check_same_dtype("ctc_loss_backward",
                   {{"log_probs", log_probs}, {"dloss", dloss}, {"dlog_probs", dlog_probs}});
  check_same_shape("ctc_loss_backward", {{"log_probs", log_probs}, {"dlog_probs", dlog_probs}});
  check_same_shape("ctc_loss_backward", {{"loss", loss}, {"dloss", dloss}});
  CAIRN_CHECK(dloss.is_contiguous() && dlog_probs.is_contiguous(), "ctc_loss_backward",
              "expected contiguous views, got strides");
  if (dlog_probs.numel() == 0) return;
  wrote(dlog_probs);
  launch(loss.device, [=](const Backend& backend) {
    backend.ctc_loss_backward(log_probs, targets, loss, alpha, dloss, dlog_probs);
  });
}

}  // namespace cairn::kernels
