// GPT-2 (Radford et al. 2019) with the names, shapes and layouts of Hugging Face's files, so that
// checkpointing::load and write_safetensors_model read and write them as they are: wte.weight,
// wpe.weight, h.0.ln_1.weight, h.0.attn.c_attn.weight ([in, out]), ... ln_f.bias. The output layer
// is wte.weight.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/world.h"
#include "cairn/nn/nn.h"

namespace gpt2 {

/// config.json's n_layer, n_head, n_embd, n_positions, vocab_size. The defaults are GPT-2's with
/// 124M.
struct Config {
  std::int64_t layers = 12, heads = 12, width = 768, positions = 1024, words = 50257;
};
Config read_config(const std::string& folder);
std::string tokenizer_file(const std::string& folder);
void write_config(const std::string& folder, const Config& config);

/// Tokens [B, T] i64.
class Gpt2 : public cairn::nn::Module {
 public:
  explicit Gpt2(const Config& config);
  std::string kind() const override { return "Gpt2"; }
  /// Logits [B, T, words].
  cairn::Tensor forward(const cairn::Tensor& tokens) override;
  const Config& config() const { return config_; }
  /// The same layers one after another: embeddings, blocks, the last norm, the output layer.
  const std::shared_ptr<cairn::nn::Sequential>& chain() const { return chain_; }
  /// Names of the layers that own weights: the chain's, but for the embeddings, which are two.
  std::vector<std::string> layers() const;

 private:
  friend class NextTokenLoss;
  cairn::Tensor hidden(const cairn::Tensor& tokens, bool recompute);
  Config config_;
  std::shared_ptr<cairn::nn::Sequential> chain_;
  std::shared_ptr<cairn::nn::Embedding> words_, positions_;
  std::shared_ptr<cairn::nn::Sequential> blocks_;
  std::shared_ptr<cairn::nn::LayerNorm> norm_;
};

/// The mean loss of predicting the tokens that follow, without logits in memory: a module, as data
/// parallel training takes one. `recompute`: the blocks keep their inputs only, and the gradients
/// of the output layer are made in the backward.
class NextTokenLoss : public cairn::nn::Module {
 public:
  explicit NextTokenLoss(std::shared_ptr<Gpt2> model) : model_(std::move(model)) {
    add_child("gpt2", model_);
  }
  std::string kind() const override { return "NextTokenLoss"; }
  /// Tokens, and those that follow each: [2, B, T] i64.
  cairn::Tensor forward(const cairn::Tensor& tokens_and_next) override;
  bool recompute = false;
  /// Given: how the chain runs, in place of `recompute`.
  std::optional<cairn::checkpointing::TrainingChoice> plan;

 private:
  std::shared_ptr<Gpt2> model_;
};

/// Reads model.safetensors of the folder: with or without "transformer." before the names; masks
/// and a second name of the tied output layer may be there. Throws core::DataError for anything
/// else.
void load(Gpt2& model, const std::string& folder);
/// Writes config.json and model.safetensors, in f32: all ranks of a world together, each its part
/// of a model that is divided among them.
void save(Gpt2& model, const std::string& folder, const cairn::World& world);
/// The same of a model with random weights, GPT-2's initialisation; with the causal masks that the
/// published files have.
void write_random(const Config& config, const std::string& folder, std::uint64_t seed);

}  // namespace gpt2
