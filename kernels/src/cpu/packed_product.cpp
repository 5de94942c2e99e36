#include "cpu/packed_product.h"

namespace cairn::kernels {

namespace {

constexpr const char* kPacked = "packed product";

using onednn::Desc;

Desc contiguous(const Shape& shape, DType dtype) {
  return onednn::desc(TensorView(nullptr, shape, dtype));
}

onednn::Operation make_product(std::int64_t rows, const Shape& b, DType compute, bool accumulate) {
  const Desc from = contiguous({rows, b[0]}, compute), to = contiguous({rows, b[1]}, DType::f32);
  const Desc any({b[0], b[1]}, onednn::data_type(compute), dnnl::memory::format_tag::any);
  dnnl::post_ops ops;
  if (accumulate) ops.append_sum(1.0f);
  dnnl::primitive_attr attr = onednn::attributes();
  attr.set_post_ops(ops);
  const auto pd = onednn::matmul_desc(from, any, nullptr, to, attr, onednn::engine());
  return {dnnl::matmul(pd),
          {{DNNL_ARG_SRC, from}, {DNNL_ARG_WEIGHTS, pd.weights_desc()}, {DNNL_ARG_DST, to}},
          pd.scratchpad_desc()};
}

Temporary converted(const Backend& backend, const TensorView& x, DType dtype) {
  Temporary copy = temporary(x.shape, dtype, x.device);
  backend.copy(x, copy.view);
  return copy;
}

}  // namespace

PackedProduct::PackedProduct(const Backend& backend, std::int64_t rows, const TensorView& b,
                             bool accumulate)
    : backend_(backend), accumulate_(accumulate) {
  if (b.dtype == DType::f64) {
    b_.view = b;
    return;
  }
  compute_ = onednn::compute_dtype_of_product(b.dtype, b.shape[0]);
  const auto key = onednn::Key(kPacked, onednn::threads_for(rows * b.numel()))
                       .add(rows)
                       .add(b.shape)
                       .add(static_cast<std::int64_t>(compute_))
                       .add(std::int64_t{accumulate});
  product_ = onednn::cached(key, [&] { return make_product(rows, b.shape, compute_, accumulate); });
  const Temporary given =
      onednn::reads(b.dtype) ? Temporary{Tensor(), b} : converted(backend, b, compute_);
  b_ = onednn::reordered(kPacked, given, onednn::desc(given.view),
                         product_->argument(DNNL_ARG_WEIGHTS));
}

void PackedProduct::operator()(const TensorView& a, const TensorView& y) const {
  if (!product_) {
    backend_.matmul(a, b_.view, y, {.accumulate = accumulate_});
    return;
  }
  const Temporary from =
      a.dtype == compute_ ? Temporary{Tensor(), a} : converted(backend_, a, compute_);
  onednn::execute(
      kPacked, *product_, y.device,
      {{DNNL_ARG_SRC, from.view.data}, {DNNL_ARG_WEIGHTS, b_.view.data}, {DNNL_ARG_DST, y.data}});
}

}  // namespace cairn::kernels
