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
  return run(x, Tensor());
}

Tensor MultiheadAttention::run(const Tensor& x, const Tensor& lengths) {
  CAIRN_CHECK(x.dims() == 3 && x.size(2) == size_, "MultiheadAttention", "expected x [B, T, ",
              size_, "], got ", x.shape());
  return (*out_)(autograd::self_attention((*qkv_)(x), heads_, options_.causal, dropout(), lengths));
}

// x [B, T, C] through that third of the projection: [B, H, T, D], which lies as [B, T, H, D].
Tensor MultiheadAttention::heads_of(const Tensor& x, std::int64_t third) const {
  const std::int64_t begin = third * size_, end = begin + size_;
  const Tensor weight = autograd::slice(qkv_->weight(), 0, begin, end);
  const Tensor bias = options_.bias ? autograd::slice(qkv_->bias(), 0, begin, end) : Tensor();
  const Tensor y = autograd::linear(x, weight, bias);
  const Shape heads{x.size(0), x.size(1), heads_, size_ / heads_};
  return autograd::transpose(autograd::reshape(y, heads), 1, 2);
}

Tensor MultiheadAttention::run(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& key_lengths) {
  for (const Tensor& x : {query, key, value}) {
    CAIRN_CHECK(x.dims() == 3 && x.size(2) == size_ && x.size(0) == query.size(0),
                "MultiheadAttention", "expected query [B, T, ", size_, "], key and value [B, S, ",
                size_, "], got ", query.shape(), ", ", key.shape(), " and ", value.shape());
  }
  const Tensor y = autograd::scaled_dot_product_attention(heads_of(query, 0), heads_of(key, 1),
                                                          heads_of(value, 2), options_.causal,
                                                          dropout(), key_lengths);
  return (*out_)(autograd::reshape(autograd::transpose(y, 1, 2), query.shape()));
}

std::shared_ptr<Module> MultiheadAttention::make_like() const {
  return std::make_shared<MultiheadAttention>(size_, heads_, options_);
}

}  // namespace cairn::nn
