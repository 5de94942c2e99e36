#include "host_view.h"

#include "cairn/core/stream.h"

namespace cairn::core {

HostView::HostView(const TensorView& source) : view_(source) {
  if (source.device.is_cuda()) {
    const TensorView span(source.data, {span_of(source)}, source.dtype, source.device);
    copy_ = Tensor::empty(span.shape, span.dtype, Device{});
    copy_bytes(span, copy_);  // is done when it returns
    view_.data = copy_.raw_data();
    view_.device = {};
    return;
  }
  Stream::current(source.device).synchronize();
}

}  // namespace cairn::core
