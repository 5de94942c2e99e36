// The tensors of GPT-2 124M in bf16, in the order in which a training step asks for them.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace bench {

/// A Block holds memory while it lives; a default one holds none.
template <class Block>
class Gpt2Blocks {
 public:
  using Allocate = std::function<Block(std::size_t bytes)>;

  /// Makes the weights, masters, moments and gradients.
  explicit Gpt2Blocks(Allocate allocate) : allocate_(std::move(allocate)) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const std::size_t n : {3u, 1u, 4u, 4u})
        states_.push_back(allocate_(n * kWidth * kWidth * 2));
    }
    const std::size_t parameters = std::size_t{124} << 20;
    for (const std::size_t size : {2u, 4u, 4u, 4u}) states_.push_back(allocate_(parameters * size));
  }

  /// A forward and a backward of `rows` tokens.
  void step(std::size_t rows) {
    const std::size_t n = rows * kWidth * 2;
    std::vector<std::vector<Block>> layers;
    for (int layer = 0; layer < kLayers; ++layer) {
      const Block scratch = allocate_(n);
      auto& saved = layers.emplace_back();
      for (const std::size_t k : {1u, 3u, 1u, 1u, 1u, 4u, 4u, 1u})
        saved.push_back(allocate_(k * n));
      for (const std::size_t k : {1u, 1u, 1u, 1u, 12u}) saved.push_back(allocate_(k * rows * 4));
    }
    Block logits = allocate_(rows * kWords * 2), gradient = allocate_(rows * kWords * 2);
    logits = Block();
    Block dx = allocate_(n);
    gradient = Block();
    for (; !layers.empty(); layers.pop_back()) {
      auto& saved = layers.back();
      Block wide = allocate_(4 * n), workspace = allocate_(std::size_t{32} << 20);
      saved[7] = Block();
      Block inner = allocate_(4 * n);
      saved[6] = saved[5] = wide = Block();
      const Block narrow = allocate_(n);
      inner = workspace = Block();
      const Block qkv = allocate_(3 * n), sums = allocate_(rows * kWidth * 4);
      dx = allocate_(n);
    }
  }

 private:
  static constexpr int kLayers = 12;
  static constexpr std::size_t kWidth = 768, kWords = 50304;
  Allocate allocate_;
  std::vector<Block> states_;
};

}  // namespace bench
