// Multi-head attention (Vaswani et al. 2017).
#pragma once

#include "cairn/nn/linear.h"
#include "cairn/nn/module.h"

namespace cairn::nn {

struct MultiheadAttentionOptions {
  bool causal =
      true;  // a token sees itself and those before it; run(): row t columns 0 .. t + S - T
  double dropout = 0.0;  // on the attention weights, in training
  bool bias = true;
  /// Of keys and of values: a divisor of `heads`, whose neighbours share them (grouped-query
  /// attention; 1: multi-query). 0: as many as heads.
  std::int64_t kv_heads = 0;
};

/// x [B, T, C] -> [B, T, C]: out(attention(q, k, v)) with q | k | v = qkv(x) and C a multiple of
/// `heads`; k and v have kv_heads C / heads columns each. Weights of qkv start Xavier-uniform,
/// biases at 0, as in PyTorch.
class MultiheadAttention : public Module {
 public:
  MultiheadAttention(std::int64_t size, std::int64_t heads,
                     const MultiheadAttentionOptions& options = {});
  std::string kind() const override { return "MultiheadAttention"; }
  Tensor forward(const Tensor& x) override;
  /// The same of padded sequences: token b, t sees only the first lengths[b] of its sequence;
  /// lengths [B] i64 on x's device. What the tokens behind them give has no meaning.
  Tensor run(const Tensor& x, const Tensor& lengths);
  /// Attention to another tensor: query [B, T, C], key and value [B, S, C] -> [B, T, C]. Weights
  /// are the same: q | k | v = qkv's parts of query, key and value. Of one tensor x it is
  /// forward(x). key_lengths [B] i64: of sample b's keys only the first key_lengths[b] count.
  Tensor run(const Tensor& query, const Tensor& key, const Tensor& value,
             const Tensor& key_lengths = {});

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  Tensor heads_of(const Tensor& x, std::int64_t first, std::int64_t count) const;
  double dropout() const { return training() ? options_.dropout : 0.0; }

  std::int64_t size_, heads_, kv_heads_;
  MultiheadAttentionOptions options_;
  std::shared_ptr<Linear> qkv_, out_;
};

}  // namespace cairn::nn
