// A recurrent language model: embedding, LSTM, logits. Index [T, B] i64 to logits [T, B, V].
#pragma once

#include <memory>

#include "cairn/nn/nn.h"

namespace bench {

class LanguageModel : public cairn::nn::Module {
 public:
  LanguageModel(std::int64_t words, std::int64_t width, int layers)
      : embedding_(add_module("embedding", cairn::nn::Embedding(words, width))),
        lstm_(add_module("lstm", cairn::nn::LSTM(width, width, {.layers = layers}))),
        head_(add_module("head", cairn::nn::Linear(width, words))) {}
  std::string kind() const override { return "LanguageModel"; }
  cairn::Tensor forward(const cairn::Tensor& index) override {
    return (*head_)((*lstm_)((*embedding_)(index)));
  }

 private:
  std::shared_ptr<cairn::nn::Embedding> embedding_;
  std::shared_ptr<cairn::nn::LSTM> lstm_;
  std::shared_ptr<cairn::nn::Linear> head_;
};

}  // namespace bench
