#include "cairn/kernels/copy.h"

#include "cairn/core/graph.h"
#include "cairn/core/peers.h"
#include "cairn/core/tensor.h"
#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

/// A dense tensor of y's layout (row-major where y is not dense) on another device.
Tensor staging_like(const TensorView& y, DType dtype, Device device) {
  const Strides strides = y.is_dense() ? y.strides : core::contiguous_strides(y.shape);
  return Tensor::empty_strided(y.shape, strides, dtype, device);
}

/// Keeps a tensor alive until what is queued on its device's current stream is done.
void keep_until_done(const Tensor& tensor) {
  const Device device = tensor.device();
  if (device.is_cpu() && !core::Stream::current(device).is_inline()) {
    core::Stream::current(device).submit([tensor] {});
  }
}

/// By y's device, which reaches x's memory: after what is queued on either's stream, before what
/// comes later on either.
void copy_directly(const TensorView& x, const TensorView& y) {
  if (y.device.is_cuda()) core::refuse_in_capture("copy", "a copy between GPUs");
  const core::Stream from = core::Stream::current(x.device), to = core::Stream::current(y.device);
  core::Event ready(x.device), done(y.device);
  ready.record(from);
  to.wait(ready);
  launch(y.device, [=](const Backend& backend) { backend.copy(x, y); });
  done.record(to);
  from.wait(done);
}

/// The conversion runs where x lies, the bytes travel once, in y's dtype and layout.
void copy_across(const TensorView& x, const TensorView& y) {
  const bool ready = x.dtype == y.dtype && x.strides == y.strides && x.is_dense();
  Tensor sent;
  if (!ready) {
    sent = staging_like(y, y.dtype, x.device);
    copy(x, sent);
  }
  const TensorView source = ready ? x : sent.view();
  if (y.is_dense()) {
    core::copy_bytes(source, y);
  } else {
    const Tensor received = staging_like(y, y.dtype, y.device);
    core::copy_bytes(source, received);
    copy(received, y);
    keep_until_done(received);
  }
  if (sent) keep_until_done(sent);
}

}  // namespace

void fill(const TensorView& y, double value) {
  check_defined("fill", {{"y", y}});
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.fill(y, value); });
}

void copy(const TensorView& x, const TensorView& y) {
  check_defined("copy", {{"x", x}, {"y", y}});
  const TensorView from = broadcast_to("copy", {"x", x}, y.shape);
  wrote(y);
  if (x.device == y.device) {
    launch(y.device, [=](const Backend& backend) { backend.copy(from, y); });
  } else if (core::reaches(y.device, x.device)) {
    copy_directly(from, y);
  } else {
    copy_across(from, y);
  }
}

}  // namespace cairn::kernels
