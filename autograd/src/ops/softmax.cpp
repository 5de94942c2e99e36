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

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& lengths) {
    Tensor y = empty_as(x, x.shape(), x.dtype());
    kernels::softmax(x, y, with(lengths));
    for (const Tensor& saved : {y, lengths}) ctx.save(saved);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor y = ctx.saved(0), lengths = ctx.saved(1);
    const Tensor dx = reuse_or_new(dy, y);
    kernels::softmax_backward(y, dy, dx, with(lengths));
    return {dx, Tensor()};
  }

 private:
  SoftmaxOptions with(const Tensor& lengths) const {
    SoftmaxOptions result = options;
    result.lengths = view_or_none(lengths);
    return result;
  }
};

}  // namespace

Tensor softmax(const Tensor& x, const SoftmaxOptions& options, const Tensor& lengths) {
  CAIRN_CHECK(
      !options.lengths.defined(), "softmax",
      "expected the lengths as a tensor of their own, which the backward keeps, got a view");
  if (options.log) return apply(Softmax<true>{options}, x, lengths);
  return apply(Softmax<false>{options}, x, lengths);
}
Tensor log_softmax(const Tensor& x) {
  return softmax(x, {.log = true});
}

}  // namespace cairn::autograd
