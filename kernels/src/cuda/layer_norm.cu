#include "cuda/layer_norm.cuh"

#include "cuda/contiguous.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

std::int64_t rows_of(View x) {
  return x.numel() / x.shape.back();
}

template <bool kCenter>
void forward(const CudaBackend& backend, const Queue& queue, View x, View weight, View bias,
             double eps, View y, View mean, View rstd) {
  if (x.numel() == 0) return;
  const Input in(backend, queue, x);
  const Output out(backend, queue, y);
  core::dispatch_floating(x.dtype, queue.op(), [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(rows_of(x), x.shape.back()), norm_kernel<kCenter, T>, rows_of(x),
           x.shape.back(), in.as<T>(), AnyFloat(weight), AnyFloat(bias), eps, out.as<T>(),
           AnyFloat(mean), AnyFloat(rstd));
  });
  out.finish();
}

/// dweight and dbias; the sum over no rows is written too.
template <class T>
void parameter_gradients(const Queue& queue, const NormParameterTerms<T>& terms, std::int64_t rows,
                         View dweight, View dbias, bool accumulate) {
  using A = Arithmetic<T>;
  if ((!dweight.defined() && !dbias.defined()) || terms.columns == 0) return;
  const ColumnSplit split = ColumnSplit::of(rows, terms.columns);
  const Buffer<A> partial = column_sums<A>(queue, split, terms);
  launch(queue, {ceil_div(terms.columns, kThreads), kThreads}, parameter_gradients_kernel<A>, split,
         partial.data(), AnyFloat(dweight), AnyFloat(dbias), accumulate);
}

template <bool kCenter>
void backward(const CudaBackend& backend, const Queue& queue, View x, View weight, View mean,
              View rstd, View dy, View dx, View dweight, View dbias, bool accumulate) {
  const std::int64_t n = x.shape.back(), rows = n == 0 ? 0 : rows_of(x);
  const Input in(backend, queue, x), grad(backend, queue, dy);
  const Output out(backend, queue, dx);
  core::dispatch_floating(x.dtype, queue.op(), [&](auto type) {
    using T = decltype(type);
    const NormParameterTerms<T> terms{in.as<T>(), grad.as<T>(), AnyFloat(mean), AnyFloat(rstd), n};
    parameter_gradients(queue, terms, rows, dweight, dbias, accumulate);  // first: dx may be dy
    if (rows == 0 || !dx.defined()) return;
    launch(queue, grid_for_rows(rows, n), norm_backward_kernel<kCenter, T>, rows, n, in.as<T>(),
           AnyFloat(weight), AnyFloat(mean), AnyFloat(rstd), grad.as<T>(), out.as<T>());
  });
  out.finish();
}

}  // namespace

void CudaBackend::layer_norm(View x, View weight, View bias, double eps, View y, View mean,
                             View rstd) const {
  const Queue queue("layer_norm", x.device);
  forward<true>(*this, queue, x, weight, bias, eps, y, mean, rstd);
}

void CudaBackend::layer_norm_backward(View x, View weight, View mean, View rstd, View dy, View dx,
                                      View dweight, View dbias, bool accumulate) const {
  const Queue queue("layer_norm_backward", x.device);
  backward<true>(*this, queue, x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate);
}

void CudaBackend::rms_norm(View x, View weight, double eps, View y, View rstd) const {
  const Queue queue("rms_norm", x.device);
  forward<false>(*this, queue, x, weight, {}, eps, y, {}, rstd);
}

void CudaBackend::rms_norm_backward(View x, View weight, View rstd, View dy, View dx, View dweight,
                                    bool accumulate) const {
  const Queue queue("rms_norm_backward", x.device);
  backward<false>(*this, queue, x, weight, {}, rstd, dy, dx, dweight, {}, accumulate);
}

}  // namespace cairn::kernels
