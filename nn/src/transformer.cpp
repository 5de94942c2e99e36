#include "cairn/nn/transformer.h"

#include "cairn/autograd/ops.h"

namespace cairn::nn {

namespace {

MultiheadAttention attention(std::int64_t size, std::int64_t heads, bool causal, double dropout) {
  return MultiheadAttention(size, heads, {.causal = causal, .dropout = dropout});
}

Linear hidden_layer(std::int64_t size, const TransformerOptions& options) {
  return Linear(size, options.feedforward, {.activation = options.activation});
}

// A block with its norm and what it is added to.
class Residual {
 public:
  Residual(const TransformerOptions& options, bool training)
      : norm_first_(options.norm_first), dropout_(training ? options.dropout : 0.0) {}

  Tensor dropped(const Tensor& x) const { return autograd::dropout(x, dropout_); }
  template <class Block>
  Tensor operator()(const Tensor& x, const Child<LayerNorm>& norm, const Block& block) const {
    if (norm_first_) return x + dropped(block(norm(x)));
    return norm(x + dropped(block(x)));
  }

 private:
  bool norm_first_;
  double dropout_;
};

}  // namespace

TransformerEncoderLayer::TransformerEncoderLayer(std::int64_t size, std::int64_t heads,
                                                 TransformerOptions options)
    : Layer(size, heads, options),
      options_(options),
      self_attn_(*this, "self_attn",
                 attention(size, heads, options.causal.value_or(false), options.dropout)),
      linear1_(*this, "linear1", hidden_layer(size, options)),
      linear2_(*this, "linear2", Linear(options.feedforward, size)),
      norm1_(*this, "norm1", LayerNorm(size, {.eps = options.eps})),
      norm2_(*this, "norm2", LayerNorm(size, {.eps = options.eps})) {}

Tensor TransformerEncoderLayer::forward(const Tensor& x) {
  return run(x, Tensor());
}

Tensor TransformerEncoderLayer::run(const Tensor& x, const Tensor& lengths) {
  const Residual residual(options_, training());
  const Tensor y = residual(x, norm1_, [&](const Tensor& z) {
    return lengths.defined() ? self_attn_->run(z, lengths) : self_attn_(z);
  });
  return residual(y, norm2_,
                  [&](const Tensor& z) { return linear2_(residual.dropped(linear1_(z))); });
}

TransformerDecoderLayer::TransformerDecoderLayer(std::int64_t size, std::int64_t heads,
                                                 TransformerOptions options)
    : Layer(size, heads, options),
      options_(options),
      self_attn_(*this, "self_attn",
                 attention(size, heads, options.causal.value_or(true), options.dropout)),
      multihead_attn_(*this, "multihead_attn", attention(size, heads, false, options.dropout)),
      linear1_(*this, "linear1", hidden_layer(size, options)),
      linear2_(*this, "linear2", Linear(options.feedforward, size)),
      norm1_(*this, "norm1", LayerNorm(size, {.eps = options.eps})),
      norm2_(*this, "norm2", LayerNorm(size, {.eps = options.eps})),
      norm3_(*this, "norm3", LayerNorm(size, {.eps = options.eps})) {}

Tensor TransformerDecoderLayer::run(const Tensor& x, const Tensor& memory,
                                    const Tensor& memory_lengths) {
  const Residual residual(options_, training());
  Tensor y = residual(x, norm1_, self_attn_);
  y = residual(y, norm2_, [&](const Tensor& z) {
    return multihead_attn_->run(z, memory, memory, memory_lengths);
  });
  return residual(y, norm3_,
                  [&](const Tensor& z) { return linear2_(residual.dropped(linear1_(z))); });
}

Tensor TransformerDecoderLayer::forward(const Tensor&) {
  core::fail("TransformerDecoderLayer", "expected run(x, memory), got a call with x alone");
}

}  // namespace cairn::nn
