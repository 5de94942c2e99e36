#include "cairn/kernels/attention.h"

#include <limits>

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

using View = const TensorView&;

void check_inputs(const char* op, View q, View k, View v, const AttentionOptions& options) {
  check_device(op, {{"q", q}, {"k", k}, {"v", v}});
  check_floating(op, {{"q", q}});
  check_same_dtype(op, {{"q", q}, {"k", k}, {"v", v}});
  check_dims(op, {"q", q}, 4);
  check_dims(op, {"k", k}, 4);
  check_same_shape(op, {{"k", k}, {"v", v}});
  CAIRN_CHECK(q.size(0) == k.size(0) && q.size(3) == k.size(3), op,
              "expected q [B, H, T, D] and k, v [B, G, S, D], got ", q.shape, " and ", k.shape);
  const bool shared = k.size(1) > 0 ? q.size(1) % k.size(1) == 0 : q.size(1) == 0;
  CAIRN_CHECK(shared && q.size(1) >= k.size(1), op,
              "expected heads of q that are a multiple of those of k and v, got q ", q.shape,
              " and k ", k.shape);
  CAIRN_CHECK(q.size(3) >= 1, op, "expected heads of at least 1 element, got q ", q.shape);
  check_lengths(op, {"q", q}, {"key_lengths", options.key_lengths}, q.size(0));
  CAIRN_CHECK(options.dropout >= 0.0 && options.dropout < 1.0, op,
              "expected a dropout in 0..1, got ", options.dropout);
}

void check_results(const char* op, View q, View y, View lse) {
  check_device(op, {{"q", q}, {"y", y}, {"lse", lse}});
  check_same_dtype(op, {{"q", q}, {"y", y}});
  check_same_shape(op, {{"q", q}, {"y", y}});
  check_dtype(op, {"lse", lse}, q.dtype == DType::f64 ? DType::f64 : DType::f32);
  check_shape(op, {"lse", lse}, {q.size(0), q.size(1), q.size(2)});
  CAIRN_CHECK(lse.is_contiguous(), op, "expected a contiguous lse, got strides ", lse.strides);
}

void check_gradient(const char* op, const Named& input, const Named& gradient) {
  check_device(op, {input, gradient});
  check_same_dtype(op, {input, gradient});
  check_same_shape(op, {input, gradient});
}

}  // namespace

void attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& y,
               const TensorView& lse, const AttentionOptions& options) {
  check_inputs("attention", q, k, v, options);
  check_results("attention", q, y, lse);
  wrote(y, lse);
  launch(y.device, [=](const Backend& backend) {
    if (k.size(2) == 0) {  // nothing to see
      backend.fill(y, 0.0);
      backend.fill(lse, -std::numeric_limits<double>::infinity());
    } else if (lse.numel() > 0) {
      backend.attention(q, k, v, y, lse, options);
    }
  });
}

void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                        const TensorView& y, const TensorView& lse, const TensorView& dy,
                        const TensorView& dq, const TensorView& dk, const TensorView& dv,
                        const AttentionOptions& options) {
  const char* const op = "attention_backward";
  check_inputs(op, q, k, v, options);
  check_results(op, q, y, lse);
  check_gradient(op, {"y", y}, {"dy", dy});
  check_gradient(op, {"q", q}, {"dq", dq});
  check_gradient(op, {"k", k}, {"dk", dk});
  check_gradient(op, {"v", v}, {"dv", dv});
  wrote(dq, dk, dv);
  launch(q.device, [=](const Backend& backend) {
    if (q.numel() > 0 && k.numel() > 0) {
      backend.attention_backward(q, k, v, y, lse, dy, dq, dk, dv, options);
    } else {
      for (const TensorView& gradient : {dq, dk, dv}) backend.fill(gradient, 0.0);
    }
  });
}

}  // namespace cairn::kernels
