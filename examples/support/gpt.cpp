#include "support/gpt.h"

#include <numeric>

#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"

namespace support {

using namespace cairn;

GptBlock::GptBlock(const GptSizes& sizes)
    : norm1_(add_module("norm1", nn::LayerNorm(sizes.width))),
      norm2_(add_module("norm2", nn::LayerNorm(sizes.width))),
      attention_(add_module("attention",
                            nn::MultiheadAttention(sizes.width, sizes.heads, {.causal = true}))),
      up_(add_module("up", nn::Linear(sizes.width, 4 * sizes.width,
                                      {.activation = autograd::Activation::gelu}))),
      down_(add_module("down", nn::Linear(4 * sizes.width, sizes.width))),
      dropout_(sizes.dropout) {}

Tensor GptBlock::forward(const Tensor& x) {
  const double p = training() ? dropout_ : 0.0;
  const Tensor y = x + autograd::dropout((*attention_)((*norm1_)(x)), p);
  const Tensor hidden = (*up_)((*norm2_)(y));
  return y + autograd::dropout((*down_)(hidden), p);
}

Gpt::Gpt(const GptSizes& sizes)
    : sizes_(sizes),
      token_(add_module("token", nn::Embedding(sizes.vocabulary, sizes.width))),
      position_(add_module("position", nn::Embedding(sizes.tokens, sizes.width))) {
  for (std::int64_t i = 0; i < sizes.layers; ++i)
    blocks_.push_back(add_module("block" + std::to_string(i), GptBlock(sizes)));
  norm_ = add_module("norm", nn::LayerNorm(sizes.width));
  head_ = add_module("head", nn::Linear(sizes.width, sizes.vocabulary, {.bias = false}));
  for (const auto& [name, parameter] :
       parameters()) {  // GPT-2's initialisation of matrices and embeddings
    if (parameter.dims() == 2) Generator::current().fill_normal(parameter, 0.0, 0.02);
  }
}

Tensor Gpt::forward(const Tensor& index) {
  const std::int64_t tokens = index.size(-1);
  CAIRN_CHECK(tokens <= sizes_.tokens, "gpt", "expected at most ", sizes_.tokens, " tokens, got ",
              tokens);
  std::vector<std::int64_t> order(static_cast<std::size_t>(tokens));
  std::iota(order.begin(), order.end(), 0);
  Tensor x =
      (*token_)(index) + (*position_)(Tensor::from(order, {tokens}, DType::i64, index.device()));
  for (const auto& block : blocks_) x = (*block)(x);
  return (*head_)((*norm_)(x));
}

}  // namespace support
