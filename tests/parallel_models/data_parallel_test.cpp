// One process with several devices against the same model on one.
#include "cairn/parallel/data_parallel.h"

#include <gmock/gmock.h>

#include <atomic>
#include <numeric>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using autograd::Reduction;
using test::expect_close;
using test::random_tensor;
using testing::HasSubstr;
using Values = std::vector<double>;

Device cpu(int i) {
  return {core::DeviceType::cpu, i};
}
std::vector<Device> cpus(int count) {
  std::vector<Device> devices;
  for (int i = 0; i < count; ++i) devices.push_back(cpu(i));
  return devices;
}

Tensor random(const Shape& shape, std::uint64_t seed) {
  return random_tensor(shape, DType::f32, cpu(0), seed);
}

nn::Sequential mlp() {
  manual_seed(3);
  return nn::Sequential(nn::Linear(6, 9), nn::Tanh(), nn::Linear(9, 5, {.bias = false}));
}

Values gradients(const nn::Module& model) {
  Values all;
  for (const auto& [name, tensor] : model.parameters()) {
    const Tensor grad = tensor.grad();
    if (!grad.defined()) continue;
    EXPECT_EQ(grad.device(), tensor.device());
    const Values values = grad.to_vector();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

Tensor labels(std::int64_t n) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(i * i % 5);
  return Tensor::from(values, {n});
}

template <class E = core::InvalidArgument, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(Scatter, CutsIntoShortLastPartsAndFewerThanDevices) {
  const auto sizes = [](std::int64_t n, int devices) {
    std::vector<std::int64_t> all;
    const std::vector<Tensor> parts = scatter(Tensor::zeros({n, 2}), cpus(devices));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].device(), cpu(static_cast<int>(i)));
      all.push_back(parts[i].size(0));
    }
    return all;
  };
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(sizes(8, 4), (Sizes{2, 2, 2, 2}));
  EXPECT_EQ(sizes(7, 4), (Sizes{2, 2, 2, 1}));
  EXPECT_EQ(sizes(5, 4), (Sizes{2, 2, 1}));  // the fourth is left over
  EXPECT_EQ(sizes(2, 4), (Sizes{1, 1}));
  EXPECT_EQ(sizes(3, 1), (Sizes{3}));
  EXPECT_EQ(sizes(0, 3), (Sizes{0}));
}

TEST(Scatter, AndGatherAreInverseAndDifferentiable) {
  Tensor x = random({7, 3}, 1);
  x.set_requires_grad(true);
  const std::vector<Tensor> parts = scatter(x, cpus(3));
  EXPECT_EQ(parts[1].to_vector(),
            x.view().slice(0, 3, 6).defined() ? autograd::slice(x, 0, 3, 6).to_vector() : Values{});
  const Tensor y = gather(parts, cpu(2));
  EXPECT_EQ(y.device(), cpu(2));
  EXPECT_EQ(y.to_vector(), x.to_vector());
  const Tensor dy = random_tensor({7, 3}, DType::f32, cpu(2), 2);
  autograd::backward(y, dy);
  EXPECT_EQ(x.grad().device(), cpu(0));
  EXPECT_EQ(x.grad().to_vector(), dy.to_vector());
}

TEST(Gather, MakesAVectorOfScalarsAndKeepsOutputsApart) {
  const std::vector<Tensor> scalars{Tensor::full({}, 1.0),
                                    Tensor::full({}, 2.0, DType::f32, cpu(1))};
  EXPECT_EQ(gather(scalars, cpu(0)).to_vector(), (Values{1.0, 2.0}));
  const std::vector<std::vector<Tensor>> parts{{random({2, 3}, 1), random({2}, 2)},
                                               {random({1, 3}, 3), random({1}, 4)}};
  const std::vector<Tensor> both = gather(parts, cpu(1));
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].shape(), (Shape{3, 3}));
  EXPECT_EQ(both[1].shape(), (Shape{3}));
}

TEST(DataParallel, OutputsAndGradientsAreTheUnsplitModels) {
  for (const int devices : {1, 2, 3, 4}) {
    for (const std::int64_t n : {1, 2, 7, 8}) {
      const std::string what = core::str(devices, " devices, ", n, " samples");
      nn::Sequential alone = mlp(), model = mlp();
      Tensor x = random({n, 6}, 1), own = random({n, 6}, 1);
      const Tensor dy = random_tensor({n, 5}, DType::f32, cpu(devices - 1), 2);
      x.set_requires_grad(true), own.set_requires_grad(true);
      const Tensor expected = alone(x);
      autograd::backward(expected, autograd::to(dy, cpu(0)));
      DataParallel parallel(model, cpus(devices), cpu(devices - 1));
      const Tensor y = parallel(own);
      EXPECT_EQ(y.device(), cpu(devices - 1));
      autograd::backward(y, dy);
      expect_close(y, expected.to_vector(), 1e-6, 1e-6, what + " y");
      expect_close(own.grad(), x.grad().to_vector(), 1e-6, 1e-6, what + " dx");
      expect_close(gradients(model), gradients(alone), 1e-5, 1e-5, what + " gradients");
    }
  }
}

TEST(DataParallel, AccumulatesOverForwardsAndBackwards) {
  nn::Sequential alone = mlp(), model = mlp();
  DataParallel parallel(model, cpus(3));
  const auto step = [](auto& f) {
    const Tensor both = f(random({5, 6}, 1)) + f(random({5, 6}, 2));  // one graph, two forwards
    autograd::backward(autograd::sum(both * both));
    autograd::backward(autograd::sum(f(random({4, 6}, 3))));
  };
  step(alone), step(parallel);
  expect_close(gradients(model), gradients(alone), 1e-5, 1e-5);
}

Tensor entropy(const Tensor& y, const Tensor& t) {
  return nn::cross_entropy(y, t);
}

TEST(DataParallelCriterion, EqualsTheLossOverTheWholeBatch) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
    for (const int devices : {1, 2, 4}) {
      for (const std::int64_t n : {1, 7, 9}) {
        const std::string what = core::str(devices, " devices, ", n, " samples");
        const auto loss = [reduction](const Tensor& y, const Tensor& t) {
          return nn::cross_entropy(y, t, {.reduction = reduction});
        };
        nn::Sequential alone = mlp(), model = mlp();
        const Tensor expected = loss(alone(random({n, 6}, 1)), labels(n));
        const Tensor weights = random(expected.shape(), 2);
        autograd::backward(expected, weights);
        DataParallelModel parallel(model, cpus(devices));
        DataParallelCriterion criterion(loss, {.reduction = reduction});
        const std::vector<Tensor> outputs = parallel(random({n, 6}, 1));
        for (std::size_t i = 0; i < outputs.size(); ++i) {
          EXPECT_EQ(outputs[i].device(), cpu(static_cast<int>(i)));
        }
        const Tensor total = criterion(outputs, labels(n));
        EXPECT_EQ(total.device(), cpu(0));
        EXPECT_EQ(total.shape(), expected.shape());
        autograd::backward(total, weights);
        expect_close(total, expected.to_vector(), 1e-6, 1e-6, what + " loss");
        expect_close(gradients(model), gradients(alone), 1e-5, 2e-6, what + " gradients");
      }
    }
  }
}

// Most of the targets that are ignored lie on one device: its mean must count for less.
TEST(DataParallelCriterion, WeighsByTheCountThatItIsTold) {
  const Tensor target =
      Tensor::from(std::vector<std::int64_t>{-100, -100, -100, 4, 2, 3, -100, -100}, {8});
  nn::Sequential alone = mlp(), model = mlp();
  const Tensor expected = entropy(alone(random({8, 6}, 1)), target);
  autograd::backward(expected);
  DataParallelModel parallel(model, cpus(4));
  DataParallelCriterion criterion(entropy, {.count = [](const Tensor& t) {
                                    double count = 0;
                                    for (const double v : t.to_vector()) count += v != -100;
                                    return count;
                                  }});
  const Tensor total = criterion(parallel(random({8, 6}, 1)), target);
  autograd::backward(total);
  EXPECT_NEAR(total.item(), expected.item(), 1e-6);
  expect_close(gradients(model), gradients(alone), 1e-5, 2e-6);
}

// [B, T] targets of outputs [B T, V], and targets that are where they belong.
TEST(DataParallelCriterion, CutsTargetsInProportion) {
  nn::Sequential alone = mlp(), model = mlp();
  const Tensor x = random({15, 6}, 1), target = labels(15);
  const double expected = entropy(alone(x), target).item();
  DataParallelModel parallel(model, cpus(2));
  DataParallelCriterion criterion([](const Tensor& y, const Tensor& t) {
    return nn::cross_entropy(y, autograd::reshape(t, {-1}));
  });
  const auto outputs = parallel.apply({autograd::reshape(x, {5, 3, 6})},
                                      [](nn::Module& replica, const std::vector<Tensor>& part) {
                                        return replica(autograd::reshape(part[0], {-1, 6}));
                                      });
  EXPECT_EQ(outputs[0].size(0), 9);
  const Tensor sentences = autograd::reshape(target, {5, 3});
  EXPECT_NEAR(criterion(outputs, sentences).item(), expected, 1e-6);
  EXPECT_NEAR(criterion(outputs, scatter(sentences, cpus(2))).item(), expected, 1e-6);
}

TEST(DataParallelModel, AppliesSeveralInputsToSeveralOutputs) {
  nn::Sequential model = mlp();
  DataParallelModel parallel(model, cpus(3));
  const Tensor a = random({5, 6}, 1), b = random({5, 6}, 2);
  const auto parts = parallel.apply({a, b}, [](nn::Module& replica, const std::vector<Tensor>& in) {
    return std::vector<Tensor>{replica(in[0]), replica(in[1]) - replica(in[0])};
  });
  const std::vector<Tensor> outputs = gather(parts, cpu(0));
  expect_close(outputs[0], model(a).to_vector(), 1e-6, 1e-6);
  expect_close(outputs[1], (model(b) - model(a)).to_vector(), 1e-6, 1e-6);
}

struct Training {
  Training()
      : model(mlp()), sgd(model.parameters(), optim::SgdOptions{.lr = 0.2, .momentum = 0.9}) {}
  nn::Sequential model;
  optim::FusedSGD sgd;

  Values run(int steps, const std::function<Tensor(const Tensor&, const Tensor&)>& loss_of) {
    Values losses;
    for (int step = 0; step < steps; ++step) {
      const auto seed = static_cast<std::uint64_t>(step);
      const Tensor loss = loss_of(random({7, 6}, seed), labels(7));
      autograd::backward(loss);
      test::expect_applied(sgd.step());
      losses.push_back(loss.item());
    }
    return losses;
  }
};

TEST(DataParallelModel, TrainsAsTheUnsplitModelAndRepeatsItsBits) {
  Training alone;
  const Values expected =
      alone.run(6, [&](const Tensor& x, const Tensor& t) { return entropy(alone.model(x), t); });
  std::vector<Values> runs;
  for (int repeat = 0; repeat < 5; ++repeat) {
    Training training;
    DataParallelModel parallel(training.model, cpus(4));
    DataParallelCriterion criterion(entropy);
    runs.push_back(training.run(
        6, [&](const Tensor& x, const Tensor& t) { return criterion(parallel(x), t); }));
    for (const auto& [name, tensor] : training.model.parameters()) {
      const Values values = tensor.to_vector();
      runs.back().insert(runs.back().end(), values.begin(), values.end());
    }
    EXPECT_EQ(runs.back(), runs[0]);
  }
  runs[0].resize(expected.size());
  expect_close(runs[0], expected, 1e-5, 1e-6, "losses");
}

TEST(DataParallelModel, FollowsFrozenParametersAndLoadedStates) {
  nn::Sequential alone = mlp(), model = mlp();
  DataParallel parallel(model, cpus(2));
  const auto step = [](auto& f, nn::Module& m, bool trains) {
    m.parameters()[0].tensor.set_requires_grad(trains);
    m.clear_grad();
    const Tensor y = f(random({4, 6}, 1));
    autograd::backward(autograd::sum(y * y));
    return y.to_vector();
  };
  for (const bool trains : {true, false, true}) {
    const Values expected = step(alone, alone, trains);
    expect_close(step(parallel, model, trains), expected, 1e-6, 1e-6);
    EXPECT_EQ(model.parameters()[0].tensor.grad().defined(), trains);
    expect_close(gradients(model), gradients(alone), 1e-5, 1e-5);
  }
  manual_seed(99);
  const nn::Sequential other(nn::Linear(6, 9), nn::Tanh(), nn::Linear(9, 5, {.bias = false}));
  alone.load_state_dict(other.state_dict()), model.load_state_dict(other.state_dict());
  const Values expected = step(alone, alone, true);
  expect_close(step(parallel, model, true), expected, 1e-6, 1e-6);
}

TEST(DataParallelModel, WhatIsWrittenToAReplicaLastsForOneForward) {
  nn::Sequential model = mlp();
  DataParallelModel parallel(model, cpus(2));
  const Tensor x = random({4, 6}, 1);
  const auto forward = [&](bool writes) {
    const autograd::NoGradGuard no_grad;
    return gather(parallel.apply({x},
                                 [&](nn::Module& replica, const std::vector<Tensor>& part) {
                                   const Tensor weight = replica.parameters()[0].tensor;
                                   if (writes && &replica != &model) kernels::fill(weight, 0.0);
                                   return replica(part[0]);
                                 }),
                  cpu(0))
        .to_vector();
  };
  const Values expected = forward(false);
  EXPECT_NE(forward(true), expected);
  EXPECT_EQ(forward(false), expected);
}

TEST(DataParallelModel, TrainsWithHalfWeightsAndMasters) {
  const auto run = [](int devices, bool before) {
    Training t;
    std::optional<DataParallelModel> parallel;
    if (before) parallel.emplace(t.model, cpus(devices));
    amp::Amp precision = amp::initialize(
        t.model, t.sgd, {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16});
    if (!before) parallel.emplace(t.model, cpus(devices));
    DataParallelCriterion criterion(entropy);
    Values losses;
    for (int step = 0; step < 6; ++step) {
      const Tensor loss = criterion((*parallel)(random({8, 6}, 1)), labels(8));
      precision.backward(loss);
      EXPECT_TRUE(precision.step().applied);
      losses.push_back(loss.item());
    }
    return losses;
  };
  const Values one = run(1, true);
  EXPECT_LT(one.back(), 0.8 * one.front());
  for (const bool before : {true, false}) expect_close(run(3, before), one, 0.03, 0.01);
}

TEST(DataParallelModel, BuffersAreTheFirstDevices) {
  const auto net = [] {
    manual_seed(8);
    return nn::Sequential(nn::Linear(6, 4), nn::BatchNorm1d(4), nn::Linear(4, 2));
  };
  nn::Sequential alone = net(), model = net();
  DataParallel parallel(model, cpus(2));
  for (int step = 0; step < 3; ++step) {
    const Tensor x = random({8, 6}, static_cast<std::uint64_t>(step));
    parallel(x);
    alone(autograd::slice(x, 0, 0, 4));  // what the first device sees
  }
  const NamedTensors got = model.buffers(), expected = alone.buffers();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tensor.to_vector(), expected[i].tensor.to_vector()) << got[i].name;
  }
  model.eval();  // the second device's evaluation uses them too
  const Tensor x = random({6, 6}, 20);
  expect_close(parallel(x), model(x).to_vector(), 1e-6, 1e-6);
}

/// Tells what holds where it runs.
class Probe : public nn::Module {
 public:
  using Look = std::function<Tensor(const Tensor&)>;
  explicit Probe(Look look) : look_(std::move(look)) {}
  std::string kind() const override { return "Probe"; }
  Tensor forward(const Tensor& x) override { return look_(x); }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Probe>(look_); }

 private:
  Look look_;
};

TEST(DataParallelModel, ThreadsHaveTheCallersState) {
  nn::Sequential model(nn::Linear(6, 4));
  DataParallelModel parallel(model, cpus(3));
  const Tensor x = random({6, 6}, 1);
  {
    const autograd::AutocastGuard region(true, DType::bf16);
    for (const Tensor& y : parallel(x)) EXPECT_EQ(y.dtype(), DType::bf16);
  }
  for (const Tensor& y : parallel(x)) EXPECT_EQ(y.dtype(), DType::f32);
  {
    const autograd::NoGradGuard no_grad;
    for (const Tensor& y : parallel(x)) EXPECT_FALSE(y.requires_grad());
  }
  for (const Tensor& y : parallel(x)) EXPECT_TRUE(y.requires_grad());

  const core::Stream side = core::Stream::create(cpu(1), "side");
  std::atomic<int> on_side{0}, at_home{0};
  Probe probe([&](const Tensor& in) {
    on_side += core::Stream::current(cpu(1)) == side ? 1 : 0;
    at_home += core::default_device() == in.device() ? 1 : 0;
    return in * 2.0;
  });
  DataParallel probes(probe, cpus(3));
  const core::StreamGuard guard(side);
  const Tensor y = probes(x);
  side.synchronize();
  EXPECT_EQ(on_side, 3);
  EXPECT_EQ(at_home, 3);
  expect_close(y, (x * 2.0).to_vector(), 0.0, 0.0);
}

TEST(DataParallelModel, RandomNumbersFollowFromTheCallers) {
  nn::Sequential model(nn::Dropout(0.5));
  DataParallel parallel(model, cpus(3));
  const Tensor x = Tensor::full({3, 400}, 1.0);
  const auto run = [&](std::uint64_t seed) {
    manual_seed(seed);
    const Values values = parallel(x).to_vector();
    return std::make_pair(values, Generator::current().offset());
  };
  const auto first = run(1);
  EXPECT_EQ(run(1), first);
  EXPECT_NE(run(2).first, first.first);
  const auto row = [&](int i) {
    return Values(first.first.begin() + 400 * i, first.first.begin() + 400 * (i + 1));
  };
  EXPECT_NE(row(0), row(1));
  EXPECT_NE(row(1), row(2));
  manual_seed(1);  // the first device draws, and the caller goes on, as without the others
  const Values plain = model(autograd::slice(x, 0, 0, 1)).to_vector();
  EXPECT_EQ(plain, row(0));
  EXPECT_EQ(Generator::current().offset(), first.second);
}

TEST(DataParallelModel, AnErrorOfADeviceComesWithItsNameWhenAllHaveEnded) {
  std::atomic<int> ended{0}, throwing{2};
  Probe probe([&](const Tensor& x) {
    if (x.device().index == throwing) core::fail("probe", "expected a good day, got a bad one");
    if (throwing == 5 && x.device().index == 3) throw std::runtime_error("not Cairn's");
    ++ended;
    return x;
  });
  DataParallelModel parallel(probe, cpus(4));
  const Tensor x = random({8, 2}, 1);
  const std::string message = error_of([&] { parallel(x); });
  EXPECT_EQ(ended, 3);
  EXPECT_THAT(message, HasSubstr("[cpu:2]"));
  EXPECT_THAT(message, HasSubstr("expected a good day, got a bad one"));
  throwing = 0;  // the calling thread's own part
  EXPECT_THAT(error_of([&] { parallel(x); }), HasSubstr("[cpu:0]"));
  throwing = 5;
  EXPECT_THAT(error_of<std::runtime_error>([&] { parallel(x); }), HasSubstr("not Cairn's"));
  throwing = -1;
  EXPECT_EQ(parallel(x).size(), 4u);  // and it goes on
  DataParallelCriterion criterion([](const Tensor& y, const Tensor&) -> Tensor {
    if (y.device().index == 1) core::fail<core::Unsupported>("loss", "no");
    return autograd::sum(y);
  });
  EXPECT_THAT(error_of<core::Unsupported>([&] { criterion(parallel(x), x); }),
              HasSubstr("[cpu:1] [loss] no"));
}

// A large output layer: gathered, all of the logits lie on the first device; balanced, none of
// others'.
TEST(DataParallelModel, MemoryIsBalanced) {
  const auto peaks = [](bool balanced) {
    manual_seed(1);
    nn::Sequential model(nn::Linear(4, 2000));
    const Tensor x = random({64, 4}, 1), target = labels(64);
    DataParallelModel parallel(model, cpus(2));
    DataParallelCriterion criterion(entropy);
    for (const Device device : cpus(2)) core::reset_peak_memory(device);
    const std::vector<Tensor> outputs = parallel(x);
    autograd::backward(balanced ? criterion(outputs, target)
                                : entropy(gather(outputs, cpu(0)), target));
    return std::vector<std::size_t>{core::memory_stats(cpu(0)).peak_total,
                                    core::memory_stats(cpu(1)).peak_total};
  };
  const auto gathered = peaks(false), balanced = peaks(true);
  const std::size_t logits = 64 * 2000 * sizeof(float);
  EXPECT_LT(balanced[0] + logits, gathered[0]);
  EXPECT_LT(balanced[0], balanced[1] + logits / 4);
}

TEST(DataParallelModel, WrongInputIsNamed) {
  nn::Sequential model = mlp();
  EXPECT_THAT(error_of([&] {
                DataParallelModel(model, {cpu(0), cpu(1), cpu(0)});
              }),
              HasSubstr("expected different devices, got cpu:0 twice"));
  EXPECT_THAT(error_of([&] { DataParallelModel(model, {cpu(0), cpu(7)}); }), HasSubstr("cpu:7"));
  EXPECT_THAT(error_of([&] {
                DataParallelModel(model, {cpu(1), cpu(0)});
              }),
              HasSubstr("expected the model on cpu:1, the first device, got '0.weight' on cpu:0"));
  DataParallelModel parallel(model, cpus(2));
  EXPECT_EQ(DataParallelModel(model).devices().size(), 4u);
  EXPECT_THAT(error_of([&] { parallel(Tensor()); }), HasSubstr("an input [N, ...]"));
  EXPECT_THAT(error_of([&] { parallel(Tensor::zeros({})); }), HasSubstr("an input [N, ...]"));
  EXPECT_THAT(error_of([&] {
                parallel.apply({Tensor::zeros({4, 6}), Tensor::zeros({3, 6})},
                               [](nn::Module&, const std::vector<Tensor>& in) { return in[0]; });
              }),
              HasSubstr("inputs of the same N"));
  DataParallelCriterion criterion(entropy), none(entropy, {.reduction = Reduction::none});
  const std::vector<Tensor> outputs = parallel(Tensor::zeros({4, 6}));
  EXPECT_THAT(error_of([&] { criterion(outputs, labels(5)); }),
              HasSubstr("cut like the outputs, of 4 in all, got [5]"));
  EXPECT_THAT(error_of([&] { criterion(outputs, std::vector<Tensor>{labels(2)}); }),
              HasSubstr("as many targets as outputs"));
  EXPECT_THAT(error_of([&] { DataParallelCriterion(nullptr); }), HasSubstr("a loss function"));
  DataParallelCriterion many([](const Tensor& y, const Tensor&) { return y; });
  EXPECT_THAT(error_of([&] { many(outputs, labels(4)); }), HasSubstr("one loss of each part"));
  nn::Sequential synced(nn::Linear(6, 4), nn::BatchNorm1d(4));
  DataParallelModel before(synced, cpus(2));
  convert_sync_batch_norm(synced, ProcessGroup::single());
  EXPECT_THAT(error_of<core::Unsupported>([&] { DataParallelModel(synced, cpus(2)); }),
              HasSubstr("'1', which is synchronised over ranks"));
  EXPECT_THAT(error_of<core::Unsupported>([&] {
                before(Tensor::zeros({4, 6}));
              }),
              HasSubstr("synchronised over ranks"));
  model.to(cpu(1));
  EXPECT_THAT(error_of([&] { parallel(Tensor::zeros({4, 6})); }), HasSubstr("model.to(device)"));
}

}  // namespace
}  // namespace cairn::parallel
