// Multi-head self-attention (Vaswani et al. 2017).
#pragma once

#include "cairn/nn/linear.h"
#include "cairn/nn/module.h"

namespace cairn::nn {

struct MultiheadAttentionOptions {
  bool causal = true;    // a token sees itself and those before it
  double dropout = 0.0;  // on the attention weights, in training
  bool bias = true;
};

/// x [B, T, C] -> [B, T, C]: out(attention(q, k, v)) with q | k | v = qkv(x) and C a multiple of
/// `heads`. Weights of qkv start Xavier-uniform, biases at 0, as in PyTorch.
class MultiheadAttention : public Module {
 public:
  MultiheadAttention(std::int64_t size, std::int64_t heads,
                     const MultiheadAttentionOptions& options = {});
  std::string kind() const override { return "MultiheadAttention"; }
  Tensor forward(const Tensor& x) override;

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t size_, heads_;
  MultiheadAttentionOptions options_;
  std::shared_ptr<Linear> qkv_, out_;
};

}  // namespace cairn::nn
