#include "cpu/rows.h"

#include <algorithm>

#include "backend.h"
#include "cpu/element.h"
#include "cpu/loop.h"

namespace cairn::kernels::cpu {

namespace {

/// Elements between neighbouring rows, or -1 where they are not evenly spaced or not contiguous
/// themselves.
std::int64_t row_stride(const TensorView& view) {
  const int last = view.dims() - 1;
  if (view.shape[last] > 1 && view.strides[last] != 1) return -1;
  std::int64_t stride = view.shape[last], span = 0;
  for (int d = last - 1; d >= 0; --d) {
    if (view.shape[d] == 1) continue;
    if (span == 0) stride = view.strides[d];
    if (span != 0 && view.strides[d] != span) return -1;
    span = view.strides[d] * view.shape[d];
  }
  return stride;
}

}  // namespace

Rows::Rows(const TensorView& view, Access access) : view_(view), access_(access) {
  width_ = view.shape.back();
  if (view.numel() == 0) {
    count_ = 0;
    return;
  }
  count_ = view.numel() / width_;
  stride_ = row_stride(view);
  data_ = view.data;
  if (stride_ >= 0) return;
  const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
  copy_ = Tensor::empty(view.shape, view.dtype, view.device);
  data_ = copy_.raw_data();
  stride_ = width_;
  if (access == Access::read) cpu_backend().copy(view, copy_);
}

void Rows::finish() const {
  if (copy_ && access_ == Access::write) cpu_backend().copy(copy_, view_);
}

Column::Column(const TensorView& view)
    : view_(view), stride_(view.dims() == 0 ? 0 : view.strides[0]) {}

double Column::get(std::int64_t i) const {
  return element_at(view_, i * stride_);
}

void Column::set(std::int64_t i, double value) const {
  set_element(view_, i * stride_, value);
}

template <class A>
std::vector<A> values_or(const TensorView& view, std::int64_t width, A absent) {
  std::vector<A> values(static_cast<std::size_t>(width), absent);
  if (!view.defined()) return values;
  const Column column(view);
  for (std::int64_t i = 0; i < width; ++i) {
    values[static_cast<std::size_t>(i)] = static_cast<A>(column.get(i));
  }
  return values;
}
template std::vector<float> values_or(const TensorView&, std::int64_t, float);
template std::vector<double> values_or(const TensorView&, std::int64_t, double);

std::int64_t row_grain(std::int64_t width) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width));
}

}  // namespace cairn::kernels::cpu
