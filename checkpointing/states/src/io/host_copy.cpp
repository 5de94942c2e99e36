#include "io/host_copy.h"

#include <cstring>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"

namespace cairn::checkpointing {

namespace {

// Row-major order of a strided host view, element by element.
Tensor gathered(const TensorView& x) {
  Tensor result = Tensor::empty(x.shape, x.dtype, Device{});
  const std::size_t width = core::size_of(x.dtype);
  const Strides row_major = core::contiguous_strides(x.shape);
  char* to = result.view().as<char>();
  for (std::int64_t i = 0; i < x.numel(); ++i, to += width) {
    std::int64_t at = 0;
    for (int d = 0; d < x.dims(); ++d) at += i / row_major[d] % x.shape[d] * x.strides[d];
    std::memcpy(to, x.as<char>() + at * static_cast<std::int64_t>(width), width);
  }
  return result;
}

}  // namespace

void wait_for_device(const Tensor& x) {
  core::Stream::current(x.device()).synchronize();
}

Tensor on_host(const Tensor& x) {
  Tensor host = x;
  if (!x.device().is_cpu()) {
    CAIRN_CHECK(x.view().is_dense(), "state", "expected dense memory on ", x.device(), ", got ",
                x.shape(), " with strides ", x.strides(), " (make it contiguous first)");
    host = Tensor::empty_strided(x.shape(), x.strides(), x.dtype(), {});
    core::copy_bytes(x, host);
  }
  wait_for_device(x);
  return host.is_contiguous() ? host : gathered(host);
}

}  // namespace cairn::checkpointing
