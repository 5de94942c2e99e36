#include "cairn/nn/attention.h"

#include "cairn/autograd/ops.h"
#include "cairn/nn/init.h"

namespace cairn::nn {

MultiheadAttention::MultiheadAttention(std::int64_t size, std::int64_t heads,
                                       const MultiheadAttentionOptions& options)
    : size_(size),
      heads_(heads),
      kv_heads_(options.kv_heads == 0 ? heads : options.kv_heads),
      options_(options) {
  CAIRN_CHECK(heads > 0 && size > 0 && size % heads == 0, "MultiheadAttention",
              "expected a size that is a multiple of the heads, got ", size, " and ", heads);
  CAIRN_CHECK(kv_heads_ > 0 && heads % kv_heads_ == 0, "MultiheadAttention",
              "expected heads that are a multiple of kv_heads, got ", heads, " and ", kv_heads_);
  const std::int64_t columns = (heads + 2 * kv_heads_) * (size / heads);
  qkv_ = add_module("qkv", Linear(size, columns, {.bias = options.bias}));
  out_ = add_module("out", Linear(size, size, {.bias = options.bias}));
  init::xavier_uniform(qkv_->weight());
  if (options.bias) {
    init::constant(qkv_->bias(), 0.0);
    init::constant(out_->bias(), 0.0);
  }
  extra_ = core::str(heads, " heads of ", size / heads, options.causal ? ", causal" : "");
  if (kv_heads_ != heads) extra_ += core::str(", ", kv_heads_, " of keys");
}

Tensor MultiheadAttention::forward(const Tensor& x) {
  return run(x, Tensor());
}

Tensor MultiheadAttention::run(const Tensor& x, const Tensor& lengths) {
  CAIRN_CHECK(x.dims() == 3 && x.size(2) == size_, "MultiheadAttention", "expected x [B, T, ",
              size_, "], got ", x.shape());
  return (*out_)(
      autograd::self_attention((*qkv_)(x), heads_, options_.causal, dropout(), lengths, kv_heads_));
}

// x [B, T, C] through `count` heads of the projection: [B, count, T, D], which lies as
// [B, T, count, D].
Tensor MultiheadAttention::heads_of(const Tensor& x, std::int64_t first, std::int64_t count) const {
  const std::int64_t D = size_ / heads_, begin = first * D, end = begin + count * D;
  const Tensor weight = autograd::slice(qkv_->weight(), 0, begin, end);
  const Tensor bias = options_.bias ? autograd::slice(qkv_->bias(), 0, begin, end) : Tensor();
  const Tensor y = autograd::linear(x, weight, bias);
  const Shape heads{x.size(0), x.size(1), count, D};
  return autograd::transpose(autograd::reshape(y, heads), 1, 2);
}

Tensor MultiheadAttention::run(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& key_lengths) {
  for (const Tensor& x : {query, key, value}) {
    CAIRN_CHECK(x.dims() == 3 && x.size(2) == size_ && x.size(0) == query.size(0),
                "MultiheadAttention", "expected query [B, T, ", size_, "], key and value [B, S, ",
                size_, "], got ", query.shape(), ", ", key.shape(), " and ", value.shape());
  }
  const Tensor y = autograd::scaled_dot_product_attention(
      heads_of(query, 0, heads_), heads_of(key, heads_, kv_heads_),
      heads_of(value, heads_ + kv_heads_, kv_heads_), options_.causal, dropout(), key_lengths);
  return (*out_)(autograd::reshape(autograd::transpose(y, 1, 2), query.shape()));
}

std::shared_ptr<Module> MultiheadAttention::make_like() const {
  return std::make_shared<MultiheadAttention>(size_, heads_, options_);
}

}  // namespace cairn::nn
