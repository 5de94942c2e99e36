#include "host_view.h"

#include "cairn/core/stream.h"

namespace cairn::core {

HostView::HostView(const TensorView& source) : view_(source) {
  const Stream stream = Stream::current(source.device);
  if (source.device.is_cuda()) {
    const TensorView span(source.data, {span_of(source)}, source.dtype, source.device);
    copy_ = Tensor::empty(span.shape, span.dtype, Device{});
    copy_bytes(span, copy_);
    view_.data = copy_.raw_data();
    view_.device = {};
  }
  stream.synchronize();
}

}  // namespace cairn::core
