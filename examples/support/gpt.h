// A small GPT: token and position embeddings, pre-norm blocks, logits over the vocabulary. Input
// [B, T] i64, output [B, T, V].
#pragma once

#include <memory>
#include <vector>

#include "cairn/nn/nn.h"

namespace support {

struct GptSizes {
  std::int64_t vocabulary = 256, tokens = 128, width = 128, layers = 4, heads = 4;
  double dropout = 0.0;
};

/// x + attention(norm(x)), then x + mlp(norm(x)); [B, T, D].
class GptBlock : public cairn::nn::Module {
 public:
  explicit GptBlock(const GptSizes& sizes);
  std::string kind() const override { return "GptBlock"; }
  cairn::Tensor forward(const cairn::Tensor& x) override;

 private:
  std::shared_ptr<cairn::nn::LayerNorm> norm1_, norm2_;
  std::shared_ptr<cairn::nn::MultiheadAttention> attention_;
  std::shared_ptr<cairn::nn::Linear> up_, down_;
  double dropout_;
};

class Gpt : public cairn::nn::Module {
 public:
  explicit Gpt(const GptSizes& sizes);
  std::string kind() const override { return "Gpt"; }
  cairn::Tensor forward(const cairn::Tensor& index) override;
  const GptSizes& sizes() const { return sizes_; }

 private:
  GptSizes sizes_;
  std::shared_ptr<cairn::nn::Embedding> token_, position_;
  std::vector<std::shared_ptr<GptBlock>> blocks_;
  std::shared_ptr<cairn::nn::LayerNorm> norm_;
  std::shared_ptr<cairn::nn::Linear> head_;
};

}  // namespace support
