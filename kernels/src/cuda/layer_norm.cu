#include "cuda/layer_norm.cuh"

#include "cuda/contiguous.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

std::int64_t rows_of(View x) {
  return x.numel() / x.shape.back();
}

/// A weight, bias or statistic of n elements in the kernel's dtype and in order: itself, a copy, or
/// `absent` throughout.
class Vector {
 public:
  Vector(const CudaBackend& backend, const Queue& queue, View view, std::int64_t n, DType dtype,
         double absent)
      : view_(view) {
    if (view.defined() && view.dtype == dtype && view.is_contiguous()) return;
    memory_ = queue.workspace(static_cast<std::size_t>(n) * core::size_of(dtype));
    view_ = TensorView(memory_->data(), {n}, dtype, queue.device());
    view.defined() ? backend.copy(view, view_) : backend.fill(view_, absent);
  }
  template <class W>
  const W* as() const {
    return view_.as<W>();
  }

 private:
  std::shared_ptr<core::Storage> memory_;
  TensorView view_;
};

/// f(T{}, W{}) with the storage types of x and of the parameters: x's, or f32 beside halves.
template <class F>
void dispatch_norm(const char* op, View x, View weight, View bias, F f) {
  const auto other = [&](View v) { return v.defined() && v.dtype != x.dtype; };
  core::dispatch_floating(x.dtype, op, [&](auto type) {
    using T = decltype(type);
    if constexpr (is_half_type<T>) {
      if (other(weight) || other(bias)) return f(type, float{});
    }
    f(type, type);
  });
}

template <bool kCenter>
void forward(const CudaBackend& backend, const Queue& queue, View x, View weight, View bias,
             double eps, View y, View mean, View rstd) {
  if (x.numel() == 0) return;
  const std::int64_t n = x.shape.back();
  const Input in(backend, queue, x);
  const Output out(backend, queue, y);
  dispatch_norm(queue.op(), x, weight, bias, [&](auto type, auto parameter_type) {
    using T = decltype(type);
    using W = decltype(parameter_type);
    const Vector w(backend, queue, weight, n, core::dtype_of<W>, 1.0);
    const Vector b(backend, queue, bias, kCenter ? n : 0, core::dtype_of<W>, 0.0);
    launch(queue, grid_for_rows(rows_of(x), n), norm_kernel<kCenter, T, W>, rows_of(x), n,
           in.as<T>(), w.as<W>(), b.as<W>(), eps, out.as<T>(), AnyFloat(mean), AnyFloat(rstd));
  });
  out.finish();
}

/// dweight and dbias; the sum over no rows is written too.
template <class T>
void parameter_gradients(const Queue& queue, const NormParameterTerms<T>& terms, std::int64_t rows,
                         View dweight, View dbias, bool accumulate) {
  using A = Arithmetic<T>;
  if ((!dweight.defined() && !dbias.defined()) || terms.columns == 0) return;
  const ColumnSplit split = ColumnSplit::of(rows, terms.columns, core::dtype_of<T>);
  const Buffer<A> partial = column_sums<A>(queue, split, packs_aligned(terms.x, terms.dy), terms);
  launch(queue, {ceil_div(terms.columns, kThreads), kThreads}, parameter_gradients_kernel<A>, split,
         partial.data(), AnyFloat(dweight), AnyFloat(dbias), accumulate);
}

template <bool kCenter>
void backward(const CudaBackend& backend, const Queue& queue, View x, View weight, View mean,
              View rstd, View dy, View dx, View dweight, View dbias, bool accumulate) {
  const std::int64_t n = x.shape.back(), rows = n == 0 ? 0 : rows_of(x);
  const Input in(backend, queue, x), grad(backend, queue, dy);
  const Output out(backend, queue, dx);
  dispatch_norm(queue.op(), x, weight, {}, [&](auto type, auto parameter_type) {
    using T = decltype(type);
    using W = decltype(parameter_type);
    using A = Arithmetic<T>;
    const Vector means(backend, queue, mean, kCenter ? rows : 0, core::dtype_of<A>, 0.0);
    const Vector rstds(backend, queue, rstd, rows, core::dtype_of<A>, 0.0);
    const NormParameterTerms<T> terms{in.as<T>(), grad.as<T>(), kCenter ? means.as<A>() : nullptr,
                                      rstds.as<A>(), n};
    parameter_gradients(queue, terms, rows, dweight, dbias, accumulate);  // first: dx may be dy
    if (rows == 0 || !dx.defined()) return;
    const Vector w(backend, queue, weight, n, core::dtype_of<W>, 1.0);
    launch(queue, grid_for_rows(rows, n), norm_backward_kernel<kCenter, T, W>, rows, n, in.as<T>(),
           w.as<W>(), terms.means, terms.rstds, grad.as<T>(), out.as<T>());
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
