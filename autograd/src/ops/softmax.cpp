#include "cairn/kernels/softmax.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using kernels::SoftmaxOptions;

namespace {

template <bool log>
struct Softmax {
  static constexpr OpInfo kInfo{log ? "log_softmax" : "softmax", CastPolicy::f32};
  SoftmaxOptions options;

  Tensor forward(Context& ctx, const Tensor& x) {
    Tensor y = empty_as(x, x.shape(), x.dtype());
    kernels::softmax(x, y, options);
    ctx.save(y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor y = ctx.saved(0);
    const Tensor dx = reuse_or_new(dy, y);
    kernels::softmax_backward(y, dy, dx, options);
    return {dx};
  }
};

}  // namespace

Tensor softmax(const Tensor& x, const SoftmaxOptions& options) {
  if (options.log) return apply(Softmax<true>{options}, x);
  return apply(Softmax<false>{options}, x);
}
Tensor log_softmax(const Tensor& x) {
  return apply(Softmax<true>{{.log = true}}, x);
}

}  // namespace cairn::autograd
