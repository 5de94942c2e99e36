#include "cairn/kernels/embedding.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

namespace {

struct Embedding {
  static constexpr OpInfo kInfo{"embedding"};

  Tensor forward(Context& ctx, const Tensor& weight, const Tensor& index) {
    CAIRN_CHECK(index.defined() && weight.dims() == 2, kInfo.name,
                "expected weight [V, D] and an index, got weight ", weight.shape());
    const Tensor whole = contiguous_data(index);
    const Tensor flat = whole.alias(whole.view().reshape({index.numel()}));
    const Tensor y = empty_as(weight, {index.numel(), weight.size(1)}, weight.dtype());
    kernels::embedding(weight, flat, y);
    ctx.save(flat);
    Shape shape = index.shape();
    shape.push_back(weight.size(1));
    return y.alias(y.view().reshape(shape));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const GradTarget target = ctx.grad_target(0);
    kernels::embedding_backward(as_matrix(dy), ctx.saved(0), target.tensor, target.accumulate);
    return {target.tensor, {}};
  }
};

}  // namespace

Tensor embedding(const Tensor& weight, const Tensor& index) {
  return apply(Embedding{}, weight, index);
}

}  // namespace cairn::autograd
