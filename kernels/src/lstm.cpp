#include "cairn/kernels/lstm.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

using View = const TensorView&;

void check_view(const char* op, View gates, const Named& v, const Shape& shape, DType dtype) {
  check_device(op, {{"gates", gates}, v});
  check_shape(op, v, shape);
  check_dtype(op, v, dtype);
  CAIRN_CHECK(v.view.is_contiguous(), op, "expected a contiguous ", v.name, ", got strides ",
              v.view.strides);
}

/// Of gates [..., B, 4 H], the dtypes and sizes that the other views must have.
struct Sizes {
  Sizes(const char* op, View gates, int dims) {
    check_defined(op, {{"gates", gates}});
    check_floating(op, {{"gates", gates}});
    check_dims(op, {"gates", gates}, dims);
    CAIRN_CHECK(gates.size(-1) % 4 == 0 && gates.is_contiguous(), op,
                "expected contiguous gates i f g o of one size, got ", gates.shape, ", strides ",
                gates.strides);
    dtype = gates.dtype;
    wide = dtype == DType::f64 ? DType::f64 : DType::f32;
    B = gates.size(-2);
    H = gates.size(-1) / 4;
  }
  Shape state() const { return {B, H}; }

  DType dtype, wide;
  std::int64_t B, H;
};

void check_loop(const char* op, View gates, View weight, View c, const LstmOptions& options,
                const Sizes& s) {
  check_device(op, {{"gates", gates}, {"weight", weight}});
  check_dtype(op, {"weight", weight}, s.dtype);
  check_shape(op, {"weight", weight}, {4 * s.H, s.H});
  check_view(op, gates, {"c", c}, {gates.size(0) + 1, s.B, s.H}, s.dtype);
  check_lengths(op, {"gates", gates}, {"lengths", options.lengths}, s.B);
}

}  // namespace

void lstm(const TensorView& gates, const TensorView& weight, const TensorView& h,
          const TensorView& c, const LstmOptions& options) {
  const Sizes s("lstm", gates, 3);
  check_loop("lstm", gates, weight, c, options, s);
  check_view("lstm", gates, {"h", h}, c.shape, s.dtype);
  wrote(gates, h, c);
  if (gates.numel() == 0) return;
  launch(gates.device, [=](const Backend& backend) { backend.lstm(gates, weight, h, c, options); });
}

void lstm_backward(const TensorView& gates, const TensorView& weight, const TensorView& c,
                   const TensorView& dy, const TensorView& dh, const TensorView& dc,
                   const LstmOptions& options) {
  const char* const op = "lstm_backward";
  const Sizes s(op, gates, 3);
  check_loop(op, gates, weight, c, options, s);
  check_view(op, gates, {"dy", dy}, c.shape, s.dtype);
  check_view(op, gates, {"dh", dh}, s.state(), s.wide);
  check_view(op, gates, {"dc", dc}, s.state(), s.wide);
  wrote(gates, dh, dc);
  if (gates.numel() == 0) return;
  launch(gates.device, [=](const Backend& backend) {
    backend.lstm_backward(gates, weight, c, dy, dh, dc, options);
  });
}

void lstm_cell(const TensorView& gates, const TensorView& hidden, const TensorView& carry,
               const TensorView& h_before, const TensorView& h, const TensorView& c,
               const LstmStep& step) {
  const char* const op = "lstm_cell";
  const Sizes s(op, gates, 2);
  check_view(op, gates, {"hidden", hidden}, gates.shape, s.wide);
  check_view(op, gates, {"carry", carry}, s.state(), s.wide);
  check_view(op, gates, {"h_before", h_before}, s.state(), s.dtype);
  check_view(op, gates, {"h", h}, s.state(), s.dtype);
  check_view(op, gates, {"c", c}, s.state(), s.dtype);
  check_lengths(op, {"gates", gates}, {"lengths", step.lengths}, s.B);
  wrote(gates, carry, h, c);
  if (gates.numel() == 0) return;
  launch(gates.device, [=](const Backend& backend) {
    backend.lstm_cell(gates, hidden, carry, h_before, h, c, step);
  });
}

void lstm_cell_backward(const TensorView& gates, const TensorView& c_before, const TensorView& c,
                        const TensorView& dy, const TensorView& dh, const TensorView& dc,
                        const LstmStep& step) {
  const char* const op = "lstm_cell_backward";
  const Sizes s(op, gates, 2);
  check_view(op, gates, {"c_before", c_before}, s.state(), s.dtype);
  check_view(op, gates, {"c", c}, s.state(), s.dtype);
  check_view(op, gates, {"dy", dy}, s.state(), s.dtype);
  check_view(op, gates, {"dh", dh}, s.state(), s.wide);
  check_view(op, gates, {"dc", dc}, s.state(), s.wide);
  check_lengths(op, {"gates", gates}, {"lengths", step.lengths}, s.B);
  wrote(gates, dh, dc);
  if (gates.numel() == 0) return;
  launch(gates.device, [=](const Backend& backend) {
    backend.lstm_cell_backward(gates, c_before, c, dy, dh, dc, step);
  });
}

}  // namespace cairn::kernels
