// Random nets whose activations are recomputed, kept by policy and offloaded at random, against
// plain training: the same bits, the same hooks, the same errors, and nothing left behind. Nets
// have tied weights, dropout, batch norms, autocast regions, parts under no_grad, several inputs
// and outputs; segments are nested; graphs are kept for a second backward; functions throw.
// CAIRN_STATEFUL_SEQUENCES says how many nets are tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/offload.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "checkpointing/activations.h"
#include "checkpointing/temporary_folder.h"
#include "support/search.h"
#include "support/tensors.h"

namespace cairn::checkpointing::activations_search {
namespace {

using Tensors = std::vector<Tensor>;
using OffloadPtr = std::shared_ptr<Offload>;

constexpr std::int64_t kRows = 6, kWidth = 8;

using activations::leaf;
using activations::live;
using activations::Values;
using test::Draw;

// ---- Nets

// A layer maps two streams [rows, width] to two.
using Layer = std::function<Tensors(const Tensors&)>;

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Calls of layers, first runs and replays; one of them may throw.
struct Calls {
  int count = 0, throws_at = -1;
  void next() {
    if (count++ == throws_at) throw Broken("a layer's own");
  }
};

struct Net {
  std::vector<Layer> layers;
  Tensors parameters, statistics;
  std::shared_ptr<Calls> calls = std::make_shared<Calls>();
};

Layer draw_product(Net& net, Draw& draw) {
  const auto parameter = [&](const Shape& shape) {
    net.parameters.push_back(leaf(shape, 100 + net.parameters.size()));
    return net.parameters.back();
  };
  switch (draw.below(5)) {
    case 0: {  // sometimes tied
      const bool tied = draw.one_in(2) && !net.parameters.empty() && net.parameters[0].dims() == 2;
      const Tensor w = tied ? net.parameters[0] : parameter({kWidth, kWidth});
      return [w](const Tensors& x) { return Tensors{autograd::linear(x[0], w), x[1]}; };
    }
    case 1: {
      const Tensor w = parameter({kWidth, kWidth}), bias = parameter({kWidth});
      return [=](const Tensors& x) {
        return Tensors{x[0], autograd::linear(x[0], w, bias) + x[1]};
      };
    }
    case 2: {
      const Tensor w = parameter({kWidth}), b = parameter({kWidth});
      return [=](const Tensors& x) { return Tensors{autograd::layer_norm(x[0], w, b), x[1]}; };
    }
    case 3: {
      const Tensor w = parameter({1, 1, 3, 3});
      return [=](const Tensors& x) {
        const Tensor image = autograd::reshape(x[0], {1, 1, kRows, kWidth});
        const Tensor y = autograd::conv2d(image, w, {}, {.padding = {1, 1}});
        return Tensors{autograd::reshape(y, {kRows, kWidth}), x[1]};
      };
    }
    default: {  // a region of its own within any other
      const Tensor w = parameter({kWidth, kWidth});
      const bool on = draw.one_in(2);
      const DType half = draw.one_in(2) ? DType::bf16 : DType::f16;
      return [=](const Tensors& x) {
        const autograd::AutocastGuard region(on, half);
        const Tensor y = autograd::gelu(autograd::linear(autograd::to(x[0], DType::f32), w));
        return Tensors{autograd::to(y, DType::f32), x[1]};
      };
    }
  }
}

Layer draw_layer(Net& net, Draw& draw) {
  switch (draw.below(16)) {
    case 0:
      return [](const Tensors& x) { return Tensors{autograd::gelu(x[0]), x[1]}; };
    case 1: {
      const Tensor mean = Tensor::zeros({kWidth}), variance = Tensor::full({kWidth}, 1);
      net.statistics.push_back(mean);
      net.statistics.push_back(variance);
      return [=](const Tensors& x) {
        return Tensors{autograd::batch_norm(x[0], {}, {}, mean, variance), x[1]};
      };
    }
    case 2:
      return [](const Tensors& x) { return Tensors{x[1], autograd::dropout(x[0], 0.3)}; };
    case 3:
      return [](const Tensors& x) { return Tensors{autograd::softmax(x[0]), x[0] + x[1]}; };
    case 4:
      return [](const Tensors& x) {
        const Tensor half = autograd::slice(x[0], 1, 0, kWidth / 2);
        return Tensors{autograd::concat({half, autograd::tanh(half)}, 1), x[1]};
      };
    case 5:
      return [](const Tensors& x) {
        const Tensor folded = autograd::reshape(x[0], {kRows / 2, 2 * kWidth});
        return Tensors{autograd::reshape(autograd::sigmoid(folded), {kRows, kWidth}), x[1]};
      };
    case 6:
      return [](const Tensors& x) {
        Tensor gate;
        {
          const autograd::NoGradGuard no_grad;
          gate = autograd::sigmoid(autograd::mean(autograd::dropout(x[1], 0.2), {1}, true));
        }
        return Tensors{x[0] * gate, x[1]};
      };
    case 7:
      return [](const Tensors& x) { return Tensors{x[0] * x[1], x[1]}; };
    case 8:
      return [](const Tensors& x) {
        return Tensors{x[0] * autograd::sigmoid(x[0].detach()), x[1]};
      };
    case 9:
      return [](const Tensors& x) {
        const Tensor y = autograd::tanh(x[0]);
        return Tensors{y, y};
      };
    case 10:
      return [](const Tensors& x) { return Tensors{x[1], x[0]}; };
    default:
      return draw_product(net, draw);
  }
}

Layer counted(const Layer& layer, const std::shared_ptr<Calls>& calls, bool before) {
  return [=](const Tensors& x) {
    if (before) calls->next();
    Tensors y = layer(x);
    if (!before) calls->next();
    return y;
  };
}

Net draw_net(Draw& draw) {
  Net net;
  const int count = 2 + draw.below(8);
  for (int i = 0; i < count; ++i) {
    const Layer layer = draw_layer(net, draw);
    net.layers.push_back(counted(layer, net.calls, draw.one_in(2)));
  }
  return net;
}

Tensors run_layers(const std::vector<Layer>& layers, Tensors x) {
  for (const Layer& layer : layers) x = layer(x);
  return x;
}

Layer plain(const Net& net) {
  return [layers = net.layers](const Tensors& x) { return run_layers(layers, x); };
}

// ---- Cuts

CheckpointOptions draw_options(Draw& draw, const OffloadPtr& offload) {
  CheckpointOptions options;
  options.check_bits = draw.one_in(2);
  if (draw.one_in(2)) return options;
  options.offload = offload;
  if (draw.one_in(2)) options.preferred_bytes = static_cast<std::size_t>(draw.below(2000));
  const int salt = draw.below(1000);
  options.policy = [salt](const SegmentOperation& operation) {
    const std::size_t h = std::hash<std::string_view>()(operation.name) + 7u * operation.occurrence;
    return static_cast<Treatment>((h + salt) % 6);
  };
  return options;
}

// One of the ways to have a part's activations elsewhere, or none.
Layer draw_part(const Layer& part, Draw& draw, const OffloadPtr& offload) {
  switch (draw.below(6)) {
    case 0:
      return part;
    case 1:
      return [part, offload](const Tensors& x) {
        const autograd::SavedTensorHooksGuard hooks(offload->hooks());
        return part(x);
      };
    default:
      return [part, options = draw_options(draw, offload)](const Tensors& x) {
        return checkpoint(SegmentToMany(part), x, options);
      };
  }
}

// Parts of the layers in segments, some within others.
Layer cut(const std::vector<Layer>& layers, Draw& draw, const OffloadPtr& offload, int depth = 0) {
  std::vector<Layer> parts;
  for (std::size_t begin = 0; begin < layers.size();) {
    const auto left = static_cast<int>(layers.size() - begin);
    const auto end = begin + 1 + static_cast<std::size_t>(draw.below(left));
    const std::vector<Layer> part(layers.begin() + static_cast<std::ptrdiff_t>(begin),
                                  layers.begin() + static_cast<std::ptrdiff_t>(end));
    begin = end;
    Layer inner = [part](const Tensors& x) { return run_layers(part, x); };
    if (depth < 3 && part.size() > 1 && draw.one_in(2)) inner = cut(part, draw, offload, depth + 1);
    parts.push_back(draw_part(inner, draw, offload));
  }
  return [parts](const Tensors& x) { return run_layers(parts, x); };
}

// ---- A step

/// What is done with a net; the same whichever way it runs.
struct Scenario {
  explicit Scenario(std::uint64_t seed) {
    Draw draw(seed ^ 0x9e3779b97f4a7c15);
    precision = draw.below(3);
    inputs = draw.below(5);
    both_outputs = draw.below(4) > 0;
    backwards = draw.below(3) == 0 ? 2 : 1;
    one_more = draw.below(4) == 0;
  }
  int precision;      // f32, autocast in f16, in bf16
  int inputs;         // two leaves, one, none, the same twice, results of operations
  bool both_outputs;  // are in the loss
  int backwards;      // of one graph
  bool one_more;      // than the graph is kept for
};

// Where half precision overflows there are values that equal nothing, nor themselves.
bool same(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

bool same(const Values& a, const Values& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return std::ranges::equal(x, y, [](double p, double q) { return same(p, q); });
  });
}

struct Outcome {
  Values values;  // loss, gradients, running statistics
  std::vector<int> hooks;
  std::uint64_t offset = 0;
  std::string refused;
  bool operator==(const Outcome& other) const {
    return same(values, other.values) && hooks == other.hooks && offset == other.offset &&
           refused == other.refused;
  }
};

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  for (const auto& list : outcome.values) {
    out << "\n  ";
    for (const double v : list) out << v << ' ';
  }
  out << "\n  hooks";
  for (const int count : outcome.hooks) out << ' ' << count;
  return out << "\n  offset " << outcome.offset << ", refused: " << outcome.refused;
}

Tensors inputs_of(const Scenario& scenario, const Tensors& leaves) {
  switch (scenario.inputs) {
    case 1:
      return {leaves[0], leaves[1].detach()};
    case 2:
      return {leaves[0].detach(), leaves[1].detach()};
    case 3:
      return {leaves[0], leaves[0]};
    case 4:
      return {autograd::tanh(leaves[0]), leaves[0] * leaves[1]};
    default:
      return leaves;
  }
}

Tensor loss_of(const Layer& model, const Scenario& scenario, const Tensors& x) {
  const autograd::AutocastGuard autocast(scenario.precision > 0,
                                         scenario.precision == 2 ? DType::bf16 : DType::f16);
  const Tensors y = model(inputs_of(scenario, x));
  const Tensor first = autograd::mean(y[0] * y[0]);
  return scenario.both_outputs ? first + autograd::mean(autograd::tanh(y[1])) : first;
}

/// Leaves the net as it was, but for its running statistics, also where a layer throws.
Outcome step(const Net& net, const Layer& model, const Scenario& scenario) {
  Tensors leaves{leaf({kRows, kWidth}, 1), leaf({kRows, kWidth}, 2)};
  leaves.insert(leaves.end(), net.parameters.begin(), net.parameters.end());
  Outcome outcome;
  outcome.hooks.resize(leaves.size());
  std::vector<autograd::HookHandle> handles;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    handles.push_back(autograd::on_gradient_ready(
        leaves[i], [&outcome, i](const Tensor&) { ++outcome.hooks[i]; }));
  }
  manual_seed(7);
  try {
    const Tensor loss = loss_of(model, scenario, leaves);
    outcome.offset = Generator::current().offset();
    outcome.values.push_back(loss.to_vector());
    if (loss.requires_grad()) {
      for (int i = 1; i <= scenario.backwards; ++i) {
        autograd::backward(loss, {}, {.retain_graph = i < scenario.backwards});
      }
    }
    for (const Tensor& t : leaves) {
      outcome.values.push_back(t.grad().defined() ? t.grad().to_vector() : std::vector<double>{});
    }
    if (scenario.one_more && loss.requires_grad()) {
      outcome.refused = message_of<core::Error>([&] { autograd::backward(loss); });
    }
    EXPECT_EQ(Generator::current().offset(), outcome.offset);
  } catch (...) {
    for (Tensor& t : leaves) t.clear_grad();
    throw;
  }
  for (Tensor& t : leaves) t.clear_grad();
  for (const Tensor& s : net.statistics) outcome.values.push_back(s.to_vector());
  return outcome;
}

void reset_statistics(const Net& net) {
  for (std::size_t i = 0; i < net.statistics.size(); ++i) {
    core::copy_bytes(Tensor::full({kWidth}, i % 2 == 0 ? 0 : 1), net.statistics[i]);
  }
}

void expect_thread_untouched() {
  EXPECT_FALSE(autograd::recomputing());
  EXPECT_TRUE(autograd::grad_enabled());
  EXPECT_FALSE(autograd::autocast_state().enabled);
}

class ActivationsSearch : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
  OffloadPtr offload_ =
      std::make_shared<Offload>(OffloadOptions{.folder = folder_.string(), .min_bytes = 1});
};

TEST_F(ActivationsSearch, EveryCutHasTheBitsTheHooksAndTheErrorsOfPlainTraining) {
  std::size_t kept = 0;
  const std::vector<std::uint64_t> seeds = test::search_seeds(300);
  for (const std::uint64_t seed : seeds) {
    const Scenario scenario(seed);
    Draw draw(seed);
    const Net net = draw_net(draw);
    const Outcome expected = step(net, plain(net), scenario);
    reset_statistics(net);
    const std::size_t before = live();
    const Outcome seen = step(net, cut(net.layers, draw, offload_), scenario);
    ASSERT_EQ(seen, expected) << "seed " << seed;
    offload_->synchronize();
    ASSERT_EQ(live(), before) << "left behind, seed " << seed;
    kept += expected.refused.empty() ? 0 : 1;
  }
  EXPECT_GE(kept, seeds.size() / 10);
  EXPECT_GT(offload_->stats().fetched_bytes, 0u);
  EXPECT_EQ(offload_->stats().stored_bytes, 0u);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.string()));
}

// A layer that throws, in the forward or in a replay: its own error comes out, nothing stays
// behind, and the next step is that of a net that never threw.
TEST_F(ActivationsSearch, WhatALayerThrowsComesOutAndLeavesNothing) {
  std::size_t in_replays = 0;
  const std::vector<std::uint64_t> seeds = test::search_seeds(200);
  for (const std::uint64_t seed : seeds) {
    Scenario scenario(seed);
    scenario.one_more = false;
    Draw draw(seed);
    const Net net = draw_net(draw);
    const Layer model = cut(net.layers, draw, offload_);
    const Outcome expected = step(net, plain(net), scenario);
    reset_statistics(net);
    offload_->synchronize();
    const std::size_t before = live();
    net.calls->count = 0;
    ASSERT_EQ(step(net, model, scenario), expected) << "seed " << seed;
    const int calls = net.calls->count;
    *net.calls = {0, draw.below(calls)};
    in_replays += net.calls->throws_at >= static_cast<int>(net.layers.size()) ? 1 : 0;
    ASSERT_THROW(step(net, model, scenario), Broken) << "seed " << seed;
    expect_thread_untouched();
    offload_->synchronize();
    ASSERT_EQ(live(), before) << "left behind, seed " << seed;
    *net.calls = {};
    reset_statistics(net);
    ASSERT_EQ(step(net, model, scenario), expected) << "seed " << seed << ", after the error";
  }
  EXPECT_GE(in_replays, seeds.size() / 10);
  offload_->synchronize();
  EXPECT_EQ(offload_->stats().stored_bytes, 0u);
}

// As DataParallel's threads do.
TEST_F(ActivationsSearch, ThreadsDoNotSeeEachOther) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "the same code, in more time";
  const std::vector<std::uint64_t> seeds = test::search_seeds(100);
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < 2; ++first) {
    threads.emplace_back([this, &seeds, first] {
      const auto offload =
          std::make_shared<Offload>(OffloadOptions{.folder = folder_.string(), .min_bytes = 1});
      for (std::size_t i = first; i < seeds.size(); i += 2) {
        const std::uint64_t seed = seeds[i];
        const Scenario scenario(seed);
        Draw draw(seed);
        const Net net = draw_net(draw);
        const Outcome expected = step(net, plain(net), scenario);
        reset_statistics(net);
        EXPECT_EQ(step(net, cut(net.layers, draw, offload), scenario), expected) << "seed " << seed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cairn::checkpointing::activations_search
