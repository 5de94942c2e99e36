// What recomputation costs and saves, for scripts/bench_checkpointing: a GPT of 24 blocks by the
// planner and by segments, at every budget, and a chain of a thousand layers. Prints one JSON line;
// times in milliseconds, memory in bytes of live tensors.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <numeric>
#include <string>
#include <variant>

#include <nlohmann/json.hpp>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/planner.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "support/gpt.h"

namespace {

using namespace cairn;
using nlohmann::json;

// As in bench/peer_recompute.py.
constexpr std::int64_t kBlocks = 24, kWidth = 128, kHeads = 4, kTokens = 128, kSamples = 8,
                       kWords = 256;
constexpr std::int64_t kLayers = 1000, kLayerWidth = 64, kRows = 256;

class Embedding : public nn::Module {
 public:
  Embedding()
      : token_(add_module("token", nn::Embedding(kWords, kWidth))),
        position_(add_module("position", nn::Embedding(kTokens, kWidth))) {}
  std::string kind() const override { return "Embedding"; }
  Tensor forward(const Tensor& index) override {
    std::vector<std::int64_t> order(kTokens);
    std::iota(order.begin(), order.end(), 0);
    return (*token_)(index) + (*position_)(Tensor::from(order, {kTokens}, DType::i64));
  }

 private:
  std::shared_ptr<nn::Embedding> token_, position_;
};

class Loss : public nn::Module {
 public:
  explicit Loss(Tensor target) : target_(std::move(target)) {}
  std::string kind() const override { return "Loss"; }
  Tensor forward(const Tensor& x) override {
    return target_.defined() ? nn::cross_entropy(x, target_) : autograd::mean(x * x);
  }

 private:
  Tensor target_;
};

class Layer : public nn::Module {
 public:
  Layer() : linear_(add_module("linear", nn::Linear(kLayerWidth, kLayerWidth))) {}
  std::string kind() const override { return "Layer"; }
  Tensor forward(const Tensor& x) override { return x + autograd::tanh((*linear_)(x)); }

 private:
  std::shared_ptr<nn::Linear> linear_;
};

Tensor integers(const Shape& shape) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::int64_t>(i * 7919 % kWords);
  }
  return Tensor::from(values, shape, DType::i64);
}

struct Chain {
  nn::Sequential model;
  Tensor x;
};

Chain gpt() {
  manual_seed(1);
  Chain chain;
  chain.model.add(Embedding());
  const support::GptSizes sizes{
      .vocabulary = kWords, .tokens = kTokens, .width = kWidth, .layers = kBlocks, .heads = kHeads};
  for (std::int64_t i = 0; i < kBlocks; ++i) chain.model.add(support::GptBlock(sizes));
  chain.model.add(nn::LayerNorm(kWidth));
  chain.model.add(nn::Linear(kWidth, kWords, {.bias = false}));
  chain.model.add(Loss(integers({kSamples, kTokens})));
  chain.x = integers({kSamples, kTokens});
  return chain;
}

Chain layers() {
  manual_seed(1);
  Chain chain;
  for (std::int64_t i = 0; i < kLayers; ++i) chain.model.add(Layer());
  chain.model.add(Loss({}));
  chain.x = Tensor::empty({kRows, kLayerWidth});
  Generator::current().fill_normal(chain.x, 0.0, 1.0);
  return chain;
}

struct Step {
  double ms = 0;
  std::size_t peak = 0;
};

Step step(nn::Sequential& model, const std::function<Tensor()>& forward) {
  core::reset_peak_memory({});
  const auto begin = std::chrono::steady_clock::now();
  autograd::backward(forward());
  const auto end = std::chrono::steady_clock::now();
  model.clear_grad();
  return {std::chrono::duration<double, std::milli>(end - begin).count(),
          core::memory_stats({}).peak_total};
}

// Sides by turns, so that what else the machine does falls on all.
std::vector<json> by_turns(nn::Sequential& model, const std::vector<std::function<Tensor()>>& sides,
                           int rounds) {
  std::vector<json> results(sides.size());
  for (int round = -1; round < rounds; ++round) {
    for (std::size_t i = 0; i < sides.size(); ++i) {
      const Step one = step(model, sides[i]);
      if (round < 0) continue;  // the first run of anything is slow
      results[i]["ms"].push_back(one.ms);
      results[i]["peak"] = one.peak;
    }
  }
  return results;
}

void predict(json& row, const checkpointing::RecomputationPlan& plan) {
  row["predicted_ms"] = 1e3 * plan.seconds();
  row["predicted_peak"] = plan.peak_bytes();
  row["report"] = plan.report();
}

// The planner against segments of square-root length, in the memory that these take.
json equal_memory(int rounds) {
  Chain chain = gpt();
  const auto segments = [&] {
    return checkpointing::checkpoint_sequential(chain.model, checkpointing::SqrtSegments{},
                                                chain.x);
  };
  step(chain.model, segments);
  const std::size_t budget = step(chain.model, segments).peak;
  const auto plan = checkpointing::plan_recomputation(chain.model, chain.x, budget,
                                                      {.tensors_only = true, .repeats = 5});
  const auto rows = by_turns(
      chain.model,
      {[&] { return plan.run(chain.x); }, segments, [&] { return chain.model(chain.x); }}, rounds);
  json all{{"planner", rows[0]}, {"segments", rows[1]}, {"plain", rows[2]}, {"budget", budget}};
  predict(all["planner"], plan);
  return all;
}

// The planner at budgets from what plain training takes down to the least, beside segments of every
// number and halves within halves.
json curve(int rounds, int points) {
  Chain chain = gpt();
  const auto plain = [&] { return chain.model(chain.x); };
  step(chain.model, plain);
  const std::size_t most = step(chain.model, plain).peak,
                    standing = core::memory_stats({}).current_total;
  std::vector<checkpointing::RecomputationPlan> plans;
  std::vector<std::size_t> budgets;
  for (int i = 0; i < points; ++i) {
    const double share = 1.0 - static_cast<double>(i) / points;
    budgets.push_back(standing +
                      static_cast<std::size_t>(share * static_cast<double>(most - standing)));
    try {
      plans.push_back(checkpointing::plan_recomputation(chain.model, chain.x, budgets.back(),
                                                        {.tensors_only = true}));
    } catch (const core::OutOfMemory&) {
      break;  // smaller ones fit neither
    }
  }
  std::vector<std::function<Tensor()>> sides{plain};
  for (const auto& plan : plans) sides.push_back([&] { return plan.run(chain.x); });
  const std::vector<checkpointing::Strategy> strategies{
      checkpointing::Segments{2}, checkpointing::Segments{3},  checkpointing::Segments{4},
      checkpointing::Segments{7}, checkpointing::Segments{14}, checkpointing::SqrtSegments{},
      checkpointing::Recursive{}};
  for (const auto& strategy : strategies) {
    sides.push_back(
        [&] { return checkpointing::checkpoint_sequential(chain.model, strategy, chain.x); });
  }
  const std::vector<json> rows = by_turns(chain.model, sides, rounds);
  json all{{"plain", rows[0]}, {"standing", standing}};
  for (std::size_t i = 0; i < plans.size(); ++i) {
    json row = rows[1 + i];
    row["budget"] = budgets[i];
    predict(row, plans[i]);
    all["points"].push_back(row);
  }
  for (std::size_t i = 0; i < strategies.size(); ++i) {
    const bool halves = std::holds_alternative<checkpointing::Recursive>(strategies[i]);
    all[halves ? "halves" : "segments"].push_back(rows[1 + plans.size() + i]);
  }
  return all;
}

// Chen et al. 2016: a network of a thousand layers in 7 GB instead of 48 for 30 % more time.
json thousand_layers(int rounds) {
  Chain chain = layers();
  const auto plain = [&] { return chain.model(chain.x); };
  step(chain.model, plain);
  const std::size_t standing = core::memory_stats({}).current_total,
                    most = step(chain.model, plain).peak;
  const std::size_t budget = standing + (most - standing) * 7 / 48;
  const auto begin = std::chrono::steady_clock::now();
  const auto plan =
      checkpointing::plan_recomputation(chain.model, chain.x, budget, {.tensors_only = true});
  const auto planning = std::chrono::steady_clock::now() - begin;
  const auto rows = by_turns(chain.model,
                             {plain, [&] { return plan.run(chain.x); },
                              [&] {
                                return checkpointing::checkpoint_sequential(
                                    chain.model, checkpointing::SqrtSegments{}, chain.x);
                              }},
                             rounds);
  json all{{"plain", rows[0]}, {"planner", rows[1]}, {"segments", rows[2]}, {"standing", standing}};
  all["plain"]["predicted_ms"] = 1e3 * plan.plain_seconds();
  all["planner"]["predicted_ms"] = 1e3 * plan.seconds();
  all["planner"]["predicted_peak"] = plan.peak_bytes();
  all["planner"]["planning_ms"] = std::chrono::duration<double, std::milli>(planning).count();
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string work = argc > 1 ? argv[1] : "";
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 5;
  json result;
  if (work == "equal_memory") result = equal_memory(rounds);
  if (work == "curve") result = curve(rounds, 10);
  if (work == "thousand_layers") result = thousand_layers(rounds);
  if (result.is_null()) {
    std::cerr << "recompute_works equal_memory|curve|thousand_layers [ROUNDS]\n";
    return 2;
  }
  std::cout << result.dump() << std::endl;
}
