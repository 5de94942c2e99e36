// Layers of a transformer (Vaswani et al. 2017), with PyTorch's children, whose attentions hold qkv
// and out in place of in_proj and out_proj.
//
//   nn::TransformerEncoderLayer encoder(512, 8);
//   nn::TransformerDecoderLayer decoder(512, 8);
//   Tensor source = Tensor::zeros({4, 20, 512});  // [B, S, C]
//   Tensor x = Tensor::zeros({4, 12, 512});       // [B, T, C]
//   Tensor y = decoder.run(x, encoder(source));                                    // [B, T, C]
//
// Sequences of different lengths are padded to the longest and come with their lengths, [B] i64:
// encoder.run(source, lengths), decoder.run(x, memory, lengths).
#pragma once

#include <optional>

#include "cairn/nn/attention.h"
#include "cairn/nn/layer.h"
#include "cairn/nn/linear.h"
#include "cairn/nn/norm.h"

namespace cairn::nn {

struct TransformerOptions {
  std::int64_t feedforward = 2048;  // width of the hidden layer
  double dropout = 0.1;  // on attention weights, hidden layer and what each block adds, in training
  autograd::Activation activation = autograd::Activation::relu;
  bool norm_first = false;     // x + block(norm(x)); else norm(x + block(x))
  std::optional<bool> causal;  // the self-attention; unset: a decoder's is, an encoder's is not
  double eps = 1e-5;           // of the norms
};

/// x [B, T, size] -> [B, T, size]: self-attention, then linear2(activation(linear1(x))).
class TransformerEncoderLayer
    : public Layer<TransformerEncoderLayer, std::int64_t, std::int64_t, TransformerOptions> {
 public:
  TransformerEncoderLayer(std::int64_t size, std::int64_t heads, TransformerOptions options = {});
  Tensor forward(const Tensor& x) override;
  Tensor run(const Tensor& x, const Tensor& lengths);  // attention sees no padding

 private:
  TransformerOptions options_;
  Child<MultiheadAttention> self_attn_;
  Child<Linear> linear1_, linear2_;
  Child<LayerNorm> norm1_, norm2_;
};

/// The same with attention to `memory`, an encoder's result, in between.
class TransformerDecoderLayer
    : public Layer<TransformerDecoderLayer, std::int64_t, std::int64_t, TransformerOptions> {
 public:
  TransformerDecoderLayer(std::int64_t size, std::int64_t heads, TransformerOptions options = {});
  /// x [B, T, size], memory [B, S, size] -> [B, T, size]. memory_lengths [B] i64: of sample b's
  /// memory only the first memory_lengths[b] rows count. x's padding lies behind what causal
  /// attention sees.
  Tensor run(const Tensor& x, const Tensor& memory, const Tensor& memory_lengths = {});
  Tensor forward(const Tensor& x) override;  // throws: use run

 private:
  TransformerOptions options_;
  Child<MultiheadAttention> self_attn_, multihead_attn_;
  Child<Linear> linear1_, linear2_;
  Child<LayerNorm> norm1_, norm2_, norm3_;
};

}  // namespace cairn::nn
