#include "cairn/nn/attention.h"

#include "cairn/autograd/ops.h"
#include "cairn/nn/init.h"

namespace cairn::nn {

MultiheadAttention::MultiheadAttention(std::int64_t size, std::int64_t heads,
                                       const MultiheadAttentionOptions& options)
    : size_(size), heads_(heads), options_(options) {
  CAIRN_CHECK(heads > 0 && size > 0 && size % heads == 0, "MultiheadAttention",
              "expected a size that is a multiple of the heads, got ", size, " and ", heads);
  qkv_ = add_module("qkv", Linear(size, 3 * size, {.bias = options.bias}));
  out_ = add_module("out", Linear(size, size, {.bias = options.bias}));
  init::xavier_uniform(qkv_->weight());
  if (options.bias) {
    init::constant(qkv_->bias(), 0.0);
    init::constant(out_->bias(), 0.0);
  }
  extra_ = core::str(heads, " heads of ", size / heads, options.causal ? ", causal" : "");
}

Tensor MultiheadAttention::forward(const Tensor& x) {
  CAIRN_CHECK(x.dims() == 3 && x.size(2) == size_, "MultiheadAttention", "expected x [B, T, ",
              size_, "], got ", x.shape());
  const double dropout = training() ? options_.dropout : 0.0;
  return (*out_)(autograd::self_attention((*qkv_)(x), heads_, options_.causal, dropout));
}

std::shared_ptr<Module> MultiheadAttention::make_like() const {
  return std::make_shared<MultiheadAttention>(size_, heads_, options_);
}

}  // namespace cairn::nn
