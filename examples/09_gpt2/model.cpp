#include "model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cairn/autograd/ops.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"

namespace gpt2 {

using namespace cairn;

/// x weight + bias with weight [in, out]: the other way round than nn::Linear.
class Conv1D : public nn::Module {
 public:
  Conv1D(std::int64_t in, std::int64_t out) {
    weight_ = add_parameter("weight", Tensor::empty({in, out}));
    nn::init::constant(weight_, 0.0);
    bias_ = add_parameter("bias", Tensor::zeros({out}));
  }
  std::string kind() const override { return "Conv1D"; }
  Tensor forward(const Tensor& x) override { return autograd::matmul(x, weight_) + bias_; }

 private:
  Tensor weight_, bias_;
};

class Attention : public nn::Module {
 public:
  Attention(std::int64_t width, std::int64_t heads)
      : heads_(heads),
        qkv_(add_module("c_attn", Conv1D(width, 3 * width))),
        out_(add_module("c_proj", Conv1D(width, width))) {}
  std::string kind() const override { return "Attention"; }
  Tensor forward(const Tensor& x) override {
    return (*out_)(autograd::self_attention((*qkv_)(x), heads_, /*causal=*/true));
  }

 private:
  std::int64_t heads_;
  std::shared_ptr<Conv1D> qkv_, out_;
};

class Mlp : public nn::Module {
 public:
  explicit Mlp(std::int64_t width)
      : up_(add_module("c_fc", Conv1D(width, 4 * width))),
        down_(add_module("c_proj", Conv1D(4 * width, width))) {}
  std::string kind() const override { return "Mlp"; }
  Tensor forward(const Tensor& x) override {
    return (*down_)(autograd::gelu((*up_)(x), /*tanh_approximation=*/true));
  }

 private:
  std::shared_ptr<Conv1D> up_, down_;
};

/// x + attention(norm(x)), then x + mlp(norm(x)); [B, T, width].
class Block : public nn::Module {
 public:
  explicit Block(const Config& config)
      : config_(config),
        norm1_(add_module("ln_1", nn::LayerNorm(config.width))),
        attention_(add_module("attn", Attention(config.width, config.heads))),
        norm2_(add_module("ln_2", nn::LayerNorm(config.width))),
        mlp_(add_module("mlp", Mlp(config.width))) {}
  std::string kind() const override { return "Block"; }
  Tensor forward(const Tensor& x) override {
    const Tensor y = x + (*attention_)((*norm1_)(x));
    return y + (*mlp_)((*norm2_)(y));
  }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Block>(config_); }

 private:
  Config config_;
  std::shared_ptr<nn::LayerNorm> norm1_;
  std::shared_ptr<Attention> attention_;
  std::shared_ptr<nn::LayerNorm> norm2_;
  std::shared_ptr<Mlp> mlp_;
};

/// What tokens and their places become: [B, T] i64 -> [B, T, width].
class Embeddings : public nn::Module {
 public:
  Embeddings(const Config& config, std::shared_ptr<nn::Embedding> words,
             std::shared_ptr<nn::Embedding> positions)
      : config_(config), words_(std::move(words)), positions_(std::move(positions)) {
    add_child("wte", words_);
    add_child("wpe", positions_);
  }
  std::string kind() const override { return "Embeddings"; }
  Tensor forward(const Tensor& tokens) override {
    const std::int64_t length = tokens.size(-1);
    CAIRN_CHECK(length <= config_.positions, "gpt2", "expected at most ", config_.positions,
                " tokens, got ", length);
    std::vector<std::int64_t> order(static_cast<std::size_t>(length));
    std::iota(order.begin(), order.end(), 0);
    const Tensor places = Tensor::from(order, {length}, DType::i64, tokens.device());
    return (*words_)(tokens) + (*positions_)(places);
  }

 protected:
  std::shared_ptr<Module> make_like() const override {
    return std::make_shared<Embeddings>(
        config_, std::make_shared<nn::Embedding>(config_.words, config_.width),
        std::make_shared<nn::Embedding>(config_.positions, config_.width));
  }

 private:
  Config config_;
  std::shared_ptr<nn::Embedding> words_, positions_;
};

// The chain comes first: names of weights are those that they have in the model.
Gpt2::Gpt2(const Config& config)
    : config_(config),
      chain_(std::make_shared<nn::Sequential>()),
      words_(std::make_shared<nn::Embedding>(config.words, config.width)),
      positions_(std::make_shared<nn::Embedding>(config.positions, config.width)),
      blocks_(std::make_shared<nn::Sequential>()),
      norm_(std::make_shared<nn::LayerNorm>(config.width)) {
  std::vector<std::shared_ptr<Block>> blocks;
  for (std::int64_t i = 0; i < config.layers; ++i)
    blocks.push_back(std::make_shared<Block>(config));
  chain_->add(std::make_shared<Embeddings>(config, words_, positions_));
  for (const auto& block : blocks) chain_->add(block);
  chain_->add(norm_);
  chain_->add(std::make_shared<nn::Linear>(words_->weight()));
  for (const auto& block : blocks) blocks_->add(block);
  add_child("wte", words_);
  add_child("wpe", positions_);
  add_child("h", blocks_);
  add_child("ln_f", norm_);
}

std::vector<std::string> Gpt2::layers() const {
  std::vector<std::string> names{"wte", "wpe"};
  for (std::int64_t i = 0; i < config_.layers; ++i) names.push_back(core::str("h.", i));
  names.emplace_back("ln_f");
  return names;
}

Tensor Gpt2::hidden(const Tensor& tokens, bool recompute) {
  Tensor x = chain_->at(0)(tokens);
  if (!recompute) return (*norm_)((*blocks_)(x));
  x = checkpointing::checkpoint_sequential(*blocks_, checkpointing::Uniform{1}, x);
  return (*norm_)(x);
}

Tensor Gpt2::forward(const Tensor& tokens) {
  return autograd::linear(hidden(tokens, false), words_->weight());
}

Tensor NextTokenLoss::forward(const Tensor& tokens_and_next) {
  const Tensor tokens = autograd::select(tokens_and_next, 0, 0),
               next = autograd::select(tokens_and_next, 0, 1);
  if (plan) return plan->loss(*model_->chain_, tokens, next);
  return nn::linear_cross_entropy(model_->hidden(tokens, recompute), model_->words_->weight(), {},
                                  next, {}, recompute);
}

namespace {

// What a published file has beside the weights: causal masks, and the output layer's own name.
bool is_known_surplus(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name == "lm_head.weight";
}

std::string config_file(const std::string& folder) {
  return (std::filesystem::path(folder) / "config.json").string();
}

Tensor causal_mask(std::int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n * n), 0.0F);
  for (std::int64_t row = 0; row < n; ++row) {
    std::fill_n(values.begin() + row * n, row + 1, 1.0F);
  }
  return Tensor::from(values, {1, 1, n, n});
}

void initialize(const Gpt2& model) {
  const double of_residuals = 0.02 / std::sqrt(2.0 * static_cast<double>(model.config().layers));
  for (const auto& [name, parameter] : model.parameters()) {
    if (parameter.dims() != 2) continue;
    const double spread = name.ends_with("c_proj.weight") ? of_residuals : 0.02;
    Generator::current().fill_normal(parameter, 0.0, spread);
  }
}

}  // namespace

std::string tokenizer_file(const std::string& folder) {
  return (std::filesystem::path(folder) / "tokenizer.json").string();
}

Config read_config(const std::string& folder) {
  std::ifstream file(config_file(folder));
  if (!file) {
    core::fail<core::IoError>("gpt2", "expected ", config_file(folder),
                              ", got nothing to read (gpt2 --write-random makes a model)");
  }
  try {
    const auto json = nlohmann::json::parse(file);
    return {.layers = json.at("n_layer"),
            .heads = json.at("n_head"),
            .width = json.at("n_embd"),
            .positions = json.at("n_positions"),
            .words = json.at("vocab_size")};
  } catch (const nlohmann::json::exception& error) {
    core::fail<core::DataError>("gpt2", "expected GPT-2's sizes in ", config_file(folder), ", got ",
                                error.what());
  }
}

void write_config(const std::string& folder, const Config& config) {
  std::filesystem::create_directories(folder);
  std::ofstream file(config_file(folder));
  const nlohmann::ordered_json json{{"architectures", {"GPT2LMHeadModel"}},
                                    {"model_type", "gpt2"},
                                    {"activation_function", "gelu_new"},
                                    {"layer_norm_epsilon", 1e-5},
                                    {"n_layer", config.layers},
                                    {"n_head", config.heads},
                                    {"n_embd", config.width},
                                    {"n_positions", config.positions},
                                    {"n_ctx", config.positions},
                                    {"vocab_size", config.words},
                                    {"tie_word_embeddings", true}};
  file << json.dump(2) << "\n";
  if (!file.flush()) core::fail<core::IoError>("gpt2", "cannot write ", config_file(folder));
}

void load(Gpt2& model, const std::string& folder) {
  const auto report =
      checkpointing::load(model, folder, {.strict = false, .names = {{"transformer.", ""}}});
  std::string problems;
  for (const std::string& name : report.missing) problems += "; missing: " + name;
  for (const std::string& name : report.surplus) {
    if (!is_known_surplus(name)) problems += "; surplus: " + name;
  }
  if (problems.empty()) return;
  core::fail<core::DataError>("gpt2", "expected the weights of GPT-2 in ", folder, ", got others",
                              problems);
}

void save(Gpt2& model, const std::string& folder, const World& world) {
  checkpointing::write_safetensors_model(folder, model.state_dict(), {.world = world});
  if (world.rank == 0) write_config(folder, model.config());
}

void write_random(const Config& config, const std::string& folder, std::uint64_t seed) {
  manual_seed(seed);
  Gpt2 model(config);
  initialize(model);
  StateDict state = model.state_dict();
  for (std::int64_t i = 0; i < config.layers; ++i) {
    StateDict& block = state.make_dict("h").make_dict(core::str(i));
    block.make_dict("attn").set("bias", causal_mask(config.positions));
  }
  write_config(folder, config);
  checkpointing::write_safetensors_model(folder, state);
}

}  // namespace gpt2
