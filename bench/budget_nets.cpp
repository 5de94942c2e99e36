#include "budget_nets.h"

#include <chrono>
#include <functional>
#include <numeric>
#include <utility>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/planner.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"

namespace bench {

using namespace cairn;

namespace {

struct BudgetNet {
  nn::Sequential model;
  Tensor x;
};

/// x + inner(x).
class Residual : public nn::Module {
 public:
  explicit Residual(nn::Sequential inner) : inner_(add_module("inner", std::move(inner))) {}
  std::string kind() const override { return "Residual"; }
  Tensor forward(const Tensor& x) override { return x + (*inner_)(x); }

 private:
  std::shared_ptr<nn::Sequential> inner_;
};

/// What a level of a U-net has beside itself: x and up(inner(down(x))), one behind the other.
class Skip : public nn::Module {
 public:
  explicit Skip(nn::Sequential inner) : inner_(add_module("inner", std::move(inner))) {}
  std::string kind() const override { return "Skip"; }
  Tensor forward(const Tensor& x) override { return autograd::concat({x, (*inner_)(x)}, 1); }

 private:
  std::shared_ptr<nn::Sequential> inner_;
};

/// silu(gate(x)) up(x), then down.
class GatedMlp : public nn::Module {
 public:
  GatedMlp(std::int64_t width, std::int64_t hidden)
      : gate_(add_module("gate", nn::Linear(width, hidden))),
        up_(add_module("up", nn::Linear(width, hidden))),
        down_(add_module("down", nn::Linear(hidden, width))) {}
  std::string kind() const override { return "GatedMlp"; }
  Tensor forward(const Tensor& x) override {
    return (*down_)(autograd::silu((*gate_)(x)) * (*up_)(x));
  }

 private:
  std::shared_ptr<nn::Linear> gate_, up_, down_;
};

/// Against classes, or, without any, the mean of the squares.
class BudgetLoss : public nn::Module {
 public:
  explicit BudgetLoss(Tensor target = {}) : target_(std::move(target)) {}
  std::string kind() const override { return "BudgetLoss"; }
  Tensor forward(const Tensor& x) override {
    return target_.defined() ? nn::cross_entropy(x, target_) : autograd::mean(x * x);
  }

 private:
  Tensor target_;
};

/// Logits of words and their loss, in one block: so the loss's gradient is written over the logits.
class WordsLoss : public nn::Module {
 public:
  WordsLoss(std::int64_t width, std::int64_t words, Tensor target)
      : linear_(add_module("linear", nn::Linear(width, words))), target_(std::move(target)) {}
  std::string kind() const override { return "WordsLoss"; }
  Tensor forward(const Tensor& x) override { return nn::cross_entropy((*linear_)(x), target_); }

 private:
  std::shared_ptr<nn::Linear> linear_;
  Tensor target_;
};

Tensor normal(const Shape& shape) {
  Tensor x = Tensor::empty(shape);
  Generator(2).fill_normal(x, 0.0, 1.0);
  return x;
}

Tensor classes(const Shape& shape, std::int64_t count) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::int64_t>(i * 7919) % count;
  }
  return Tensor::from(values, shape, DType::i64);
}

nn::Conv2d conv3(std::int64_t in, std::int64_t out, std::int64_t stride = 1) {
  return nn::Conv2d(in, out, 3, {.stride = stride, .padding = 1, .bias = false});
}

BudgetNet mlp() {
  BudgetNet net;
  for (int i = 0; i < 12; ++i) {
    net.model.add(nn::Linear(256, 256));
    net.model.add(nn::GELU());
  }
  net.model.add(BudgetLoss());
  net.x = normal({1024, 256});
  return net;
}

BudgetNet small_mlp() {  // activations of half a MiB: the C library's heap has them
  BudgetNet net;
  for (int i = 0; i < 30; ++i) {
    net.model.add(nn::Linear(128, 128));
    net.model.add(nn::Tanh());
  }
  net.model.add(BudgetLoss());
  net.x = normal({1000, 128});
  return net;
}

BudgetNet bn_dropout() {
  BudgetNet net;
  std::int64_t width = 128;
  for (const std::int64_t next : {256, 512, 256, 128, 256, 512, 256, 64}) {
    net.model.add(nn::Linear(width, next));
    net.model.add(nn::BatchNorm1d(next));
    net.model.add(nn::ReLU());
    net.model.add(nn::Dropout(0.1));
    width = next;
  }
  net.model.add(BudgetLoss());
  net.x = normal({1000, 128});
  return net;
}

BudgetNet conv_net() {
  BudgetNet net;
  net.model = nn::Sequential(
      nn::Conv2d(1, 16, 5, {.padding = 2}), nn::BatchNorm2d(16, {.relu = true}), nn::MaxPool2d(2),
      nn::Conv2d(16, 32, 5, {.padding = 2}), nn::BatchNorm2d(32, {.relu = true}), nn::MaxPool2d(2),
      nn::Flatten(), nn::Linear(32 * 7 * 7, 10), BudgetLoss(classes({128}, 10)));
  net.x = normal({128, 1, 28, 28});
  return net;
}

BudgetNet resnet() {
  BudgetNet net;
  net.model.add(conv3(3, 32));
  for (int i = 0; i < 4; ++i) {
    net.model.add(Residual(nn::Sequential(conv3(32, 32), nn::BatchNorm2d(32, {.relu = true}),
                                          conv3(32, 32), nn::BatchNorm2d(32))));
    net.model.add(nn::ReLU());
  }
  net.model.add(nn::GlobalAvgPool2d());
  net.model.add(nn::Flatten());
  net.model.add(nn::Linear(32, 10));
  net.model.add(BudgetLoss(classes({16}, 10)));
  net.x = normal({16, 3, 32, 32});
  return net;
}

BudgetNet unet() {
  const auto level = [](std::int64_t width, nn::Sequential inner) {
    nn::Sequential all(conv3(width, 2 * width, 2), nn::ReLU());
    all.add(std::move(inner));
    all.add(nn::ConvTranspose2d(2 * width, width, 2, {.stride = 2}));
    all.add(nn::ReLU());
    nn::Sequential block;
    block.add(Skip(std::move(all)));
    block.add(conv3(2 * width, width));
    block.add(nn::ReLU());
    return block;
  };
  BudgetNet net;
  net.model.add(conv3(3, 16));
  for (int i = 0; i < 4; ++i) {
    net.model.add(level(16, level(32, nn::Sequential(conv3(64, 64), nn::ReLU()))));
  }
  net.model.add(conv3(16, 1));
  net.model.add(BudgetLoss());
  net.x = normal({4, 3, 64, 64});
  return net;
}

BudgetNet generator() {
  BudgetNet net;
  net.model.add(nn::ConvTranspose2d(64, 128, 4));
  std::int64_t width = 128;
  for (const std::int64_t next : {64, 32, 16, 8}) {
    net.model.add(nn::BatchNorm2d(width, {.relu = true}));
    net.model.add(nn::ConvTranspose2d(width, next, 4, {.stride = 2, .padding = 1}));
    width = next;
  }
  net.model.add(nn::Tanh());
  net.model.add(BudgetLoss());
  net.x = normal({64, 64, 1, 1});
  return net;
}

/// Token and position embeddings.
class BudgetEmbedding : public nn::Module {
 public:
  BudgetEmbedding(std::int64_t words, std::int64_t tokens, std::int64_t width)
      : token_(add_module("token", nn::Embedding(words, width))),
        position_(add_module("position", nn::Embedding(tokens, width))) {}
  std::string kind() const override { return "BudgetEmbedding"; }
  Tensor forward(const Tensor& index) override {
    std::vector<std::int64_t> order(static_cast<std::size_t>(index.size(1)));
    std::iota(order.begin(), order.end(), 0);
    return (*token_)(index) + (*position_)(Tensor::from(order, {index.size(1)}, DType::i64));
  }

 private:
  std::shared_ptr<nn::Embedding> token_, position_;
};

BudgetNet gpt() {
  BudgetNet net;
  net.model.add(BudgetEmbedding(1000, 128, 128));
  for (int i = 0; i < 6; ++i) {
    net.model.add(Residual(
        nn::Sequential(nn::LayerNorm(128), nn::MultiheadAttention(128, 4, {.causal = true}))));
    net.model.add(Residual(nn::Sequential(nn::LayerNorm(128), nn::Linear(128, 512), nn::GELU(),
                                          nn::Linear(512, 128))));
  }
  net.model.add(nn::LayerNorm(128));
  net.model.add(nn::Linear(128, 1000, {.bias = false}));
  net.model.add(BudgetLoss(classes({8, 128}, 1000)));
  net.x = classes({8, 128}, 1000);
  return net;
}

BudgetNet encoder() {
  BudgetNet net;
  for (int i = 0; i < 6; ++i) {
    net.model.add(nn::TransformerEncoderLayer(128, 4, {.feedforward = 512}));
  }
  net.model.add(BudgetLoss());
  net.x = normal({8, 128, 128});
  return net;
}

BudgetNet gated() {
  BudgetNet net;
  for (int i = 0; i < 8; ++i) {
    net.model.add(Residual(nn::Sequential(nn::RMSNorm(192), GatedMlp(192, 512))));
  }
  net.model.add(BudgetLoss());
  net.x = normal({512, 192});
  return net;
}

BudgetNet lstm() {
  constexpr std::int64_t kWords = 40'000;
  BudgetNet net;
  net.model = nn::Sequential(nn::Embedding(kWords, 64), nn::LSTM(64, 64, {.batch_first = true}),
                             nn::LSTM(64, 64, {.batch_first = true}),
                             WordsLoss(64, kWords, classes({8, 64}, kWords)));
  net.x = classes({8, 64}, kWords);
  return net;
}

BudgetNet deep_lstm() {
  BudgetNet net;
  net.model.add(nn::Embedding(2000, 96));
  for (int i = 0; i < 5; ++i) {
    net.model.add(nn::LSTM(96, 96, {.batch_first = true}));
    net.model.add(nn::Dropout(0.1));
  }
  net.model.add(nn::Linear(96, 2000));
  net.model.add(BudgetLoss(classes({32, 64}, 2000)));
  net.x = classes({32, 64}, 2000);
  return net;
}

struct NamedNet {
  const char* name;
  BudgetNet (*make)();
};
constexpr NamedNet kNets[] = {{"mlp", mlp},
                              {"small_mlp", small_mlp},
                              {"bn_dropout", bn_dropout},
                              {"conv_net", conv_net},
                              {"resnet", resnet},
                              {"unet", unet},
                              {"generator", generator},
                              {"gpt", gpt},
                              {"encoder", encoder},
                              {"gated", gated},
                              {"lstm", lstm},
                              {"deep_lstm", deep_lstm}};

BudgetNet net_of(const std::string& name) {
  for (const NamedNet& net : kNets) {
    manual_seed(1);
    if (net.name == name) return net.make();
  }
  core::fail("budget_nets", "expected one of the nets, got '", name, "'");
}

// FNV-1a.
void add_to(std::uint64_t& sum, const Tensor& x) {
  const auto* bytes = static_cast<const unsigned char*>(x.storage()->data());
  for (std::size_t i = 0; i < x.storage()->bytes(); ++i) sum = (sum ^ bytes[i]) * 0x100000001b3;
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns false where nothing fits; `least` says what would.
bool plan(BudgetNet& net, std::size_t budget, BudgetRun& run) {
  try {
    const auto plan = checkpointing::plan_recomputation(net.model, net.x, budget,
                                                        {.repeats = 1, .memory_slots = 100});
    plan.apply(net.model);
    run.schedule = plan.report();
    return true;
  } catch (const core::OutOfMemory& error) {
    const std::string message = error.what(), start = "a budget of at least ";
    const std::size_t at = message.find(start);
    if (at == std::string::npos) throw;
    run.least = std::stoull(message.substr(at + start.size()));
    return false;
  }
}

}  // namespace

std::vector<std::string> budget_nets() {
  std::vector<std::string> names;
  for (const NamedNet& net : kNets) names.emplace_back(net.name);
  return names;
}

BudgetRun run_within_budget(const std::string& name, std::size_t budget, int steps) {
  BudgetRun run;
  run.start = core::process_memory("VmRSS");
  BudgetNet net = net_of(name);
  optim::FusedSGD optimizer(net.model.parameters(), {.lr = 0.01});
  run.before = core::process_memory("VmRSS");
  bool fits = true;
  run.planning_seconds = seconds_of([&] { fits = budget == 0 || plan(net, budget, run); });
  run.planning = core::process_memory("VmHWM");
  run.after = core::process_memory("VmRSS");
  run.gradients = 0xcbf29ce484222325;
  for (int step = 0; fits && step < steps; ++step) {
    manual_seed(3 + static_cast<std::uint64_t>(step));
    run.seconds = seconds_of([&] { autograd::backward(net.model(net.x)); });
    for (const auto& p : net.model.parameters()) add_to(run.gradients, p.tensor.grad());
    (void)optimizer.step();
    net.model.clear_grad();
  }
  run.process = core::process_memory("VmHWM");
  const std::size_t now = core::process_memory("VmRSS"), tensors = core::memory_stats({}).reserved;
  run.beside = now > tensors ? now - tensors : 0;
  return run;
}

}  // namespace bench
