// Training states, recomputation, offload, and libtorch's own optimizers. Python's side, where
// CAIRN_TORCH_PYTHON names one that has torch.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <set>

#include "cairn/checkpointing/offload.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/libtorch/checkpoint.h"
#include "cairn/libtorch/generator.h"
#include "cairn/libtorch/optimizer.h"
#include "libtorch/support.h"
#include "support/message_of.h"
#include "support/step.h"
#include "support/test_folder.h"

namespace cairn::test {
namespace {

using amp::OptLevel;
using ::testing::HasSubstr;

std::string folder_of_test() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const auto folder = std::filesystem::temp_directory_path() /
                      (std::string("cairn_libtorch_") + test->name() + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder.string();
}

/// With batch norm and dropout.
struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : in(register_module("in", torch::nn::Linear(6, 16))),
        norm(register_module("norm", torch::nn::BatchNorm1d(16))),
        dropout(register_module("dropout", torch::nn::Dropout(0.4))),
        out(register_module("out", torch::nn::Linear(16, 3))) {}
  torch::Tensor hidden(const torch::Tensor& x) { return dropout(torch::relu(norm(in(x)))); }
  torch::Tensor forward(const torch::Tensor& x) { return out(hidden(x)); }
  torch::nn::Linear in;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout dropout;
  torch::nn::Linear out;
};
TORCH_MODULE(Block);

enum class Whose { cairns, torchs };

/// A run whose steps draw their batches and masks from libtorch's generator.
struct RandomRun {
  explicit RandomRun(Whose whose, std::uint64_t seed)
      : net((torch::manual_seed(seed), Block())),
        theirs(net->parameters(), torch::optim::AdamWOptions(1e-2)),
        optimizer(whose == Whose::cairns
                      ? std::unique_ptr<optim::Optimizer>(std::make_unique<optim::FusedAdam>(
                            model.parameters(), optim::AdamOptions{.lr = 1e-2}))
                      : std::make_unique<libtorch::TorchOptimizer>(model, theirs)),
        precision(libtorch::initialize(model, *optimizer,
                                       {.opt_level = OptLevel::O2, .half_dtype = DType::bf16})) {}
  void step() {
    const auto x = torch::randn({8, 6});
    const auto y = model.run([&](const torch::Tensor& input) { return net->forward(input); }, x);
    precision.backward((y - x.slice(1, 0, 3)).square().mean());
    EXPECT_TRUE(precision.step().applied);
  }
  std::vector<float> values() {
    std::vector<float> all;
    for (const NamedTensors& list : {model.parameters(), model.buffers()}) {
      for (const auto& [name, tensor] : list) {
        const auto part = kernels::master_value(tensor).to_vector<float>();
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    return all;
  }
  Block net;
  libtorch::Model model{*net};
  torch::optim::AdamW theirs;
  std::unique_ptr<optim::Optimizer> optimizer;
  libtorch::Amp precision;
  libtorch::Generators generators;
  checkpointing::TrainingState state{
      {{"model", model}, {"optimizer", *optimizer}, {"amp", precision}, {"random", generators}}};
};

class Resume : public ::testing::TestWithParam<Whose> {};

TEST_P(Resume, ContinuesTheBitsOfTheUnbrokenRun) {
  const std::string folder = folder_of_test();
  std::vector<float> expected;
  {
    RandomRun unbroken(GetParam(), 1);
    for (int i = 0; i < 3; ++i) unbroken.step();
    unbroken.state.save(folder, 3);
    for (int i = 0; i < 3; ++i) unbroken.step();
    expected = unbroken.values();
  }
  RandomRun resumed(GetParam(), 2);
  resumed.step();
  ASSERT_TRUE(resumed.state.resume_latest(folder));
  EXPECT_EQ(resumed.state.step(), 3);
  for (int i = 0; i < 3; ++i) resumed.step();
  EXPECT_EQ(resumed.values(), expected);
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Libtorch, Resume, ::testing::Values(Whose::cairns, Whose::torchs));

TEST(LibtorchState, RefusesWhatDoesNotFit) {
  RandomRun run(Whose::cairns, 1);
  const auto before = run.values();
  StateDict wrong = run.model.state_dict();
  wrong.make_dict("in").set("weight", Tensor::zeros({2, 2}));
  EXPECT_THAT(message_of<core::DataError>([&] { run.model.load_state_dict(wrong); }),
              HasSubstr("in.weight"));
  EXPECT_EQ(run.values(), before);
  StateDict random = run.generators.state_dict();
  random.set("cpu", Tensor::zeros({3}, DType::u8));
  EXPECT_THROW(run.generators.load_state_dict(random), core::DataError);
}

TEST(LibtorchTorchOptimizer, StepsAsItDoesAlone) {
  PlainLoop plain;
  ConvNet net = conv_net();
  libtorch::Model model(*net);
  torch::optim::AdamW theirs(net->parameters(),
                             torch::optim::AdamWOptions(1e-2).weight_decay(0.01));
  libtorch::TorchOptimizer optimizer(model, theirs);
  auto precision =
      libtorch::initialize(model, optimizer, {.opt_level = OptLevel::O0, .loss_scale = 1024.0});
  for (std::uint64_t i = 0; i < 3; ++i) {
    const Batch batch = batch_of(8, i);
    plain.step(batch);
    precision.backward(torch::nll_loss(
        model.run([&](const auto& x) { return net->forward(x); }, batch.data), batch.target));
    EXPECT_TRUE(precision.step().applied);
  }
  for (const auto& x : plain.net->named_parameters()) {
    EXPECT_LE(difference(net->named_parameters()[x.key()], x.value()), 1e-5) << x.key();
  }
  optimizer.set_lr(0.5);
  precision.backward(net->fc->bias.sum());
  test::expect_applied(precision.step());
  EXPECT_EQ(theirs.param_groups()[0].options().get_lr(), 0.5);
  theirs.param_groups()[0].options().set_lr(0.25);
  precision.backward(net->fc->bias.sum());
  test::expect_applied(precision.step());
  EXPECT_EQ(optimizer.lr(), 0.25);
}

TEST(LibtorchTorchOptimizer, LoadsAStateOfBeforeTheFirstStep) {
  torch::nn::Linear net(3, 2);
  libtorch::Model model(*net);
  torch::optim::SGD theirs(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  libtorch::TorchOptimizer optimizer(model, theirs);
  const StateDict before = optimizer.state_dict();
  model.backward(net->weight.sum());
  test::expect_applied(optimizer.step());
  EXPECT_EQ(theirs.state().size(), 1u);
  optimizer.load_state_dict(before);
  EXPECT_TRUE(theirs.state().empty()) << "momentum of a step that the state knows nothing of";
}

TEST(LibtorchTorchOptimizer, IsSkippedAndUpdatesMasters) {
  ConvNet net = conv_net();
  libtorch::Model model(*net);
  torch::optim::SGD theirs(net->parameters(), torch::optim::SGDOptions(1e-5).momentum(0.9));
  libtorch::TorchOptimizer optimizer(model, theirs);
  auto precision = libtorch::initialize(
      model, optimizer,
      {.opt_level = OptLevel::O2, .half_dtype = DType::f16, .scaler = {.init_scale = 256}});
  const auto half = net->fc->bias.clone();
  precision.backward((net->fc->bias * 1e30).sum());
  EXPECT_EQ(precision.step().culprit, "fc.bias");
  EXPECT_TRUE(net->fc->bias.equal(half));
  const auto exact = [&] {
    for (const auto& [name, tensor] : model.parameters()) {
      if (name == "fc.bias") return libtorch::to_torch(kernels::master_value(tensor)).clone();
    }
    return torch::Tensor();
  };
  const auto before = exact();
  precision.backward(net->fc->bias.sum());
  EXPECT_TRUE(precision.step().applied);
  EXPECT_LE(difference(before - exact(), torch::full({5}, 1e-5)), 1e-2)
      << "a step that f16 would lose";
  EXPECT_EQ(net->fc->bias.scalar_type(), torch::kHalf);
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_THROW(libtorch::TorchOptimizer(model, lbfgs), core::Unsupported);
}

// 1 + 2^-7 is a bf16 number, 1.5 times it is none.
TEST(LibtorchTorchOptimizer, KeepsMomentsInF32WithoutMastersToo) {
  constexpr float kGradient = 1.0F + 0x1p-7F;
  StateDict state;
  const auto steps = [&](const amp::Options& options, int count) {
    torch::nn::Linear net(1, 1);
    libtorch::Model model(*net);
    torch::optim::SGD theirs(net->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5));
    libtorch::TorchOptimizer optimizer(model, theirs);
    auto precision = libtorch::initialize(model, optimizer, options);
    if (!state.empty()) optimizer.load_state_dict(state);
    for (int i = 0; i < count; ++i) {
      precision.backward((net->bias * kGradient).sum());
      EXPECT_TRUE(precision.step().applied);
    }
    state = optimizer.state_dict();
    const auto& own = theirs.state().at(net->bias.unsafeGetTensorImpl());
    const auto moment = static_cast<torch::optim::SGDParamState&>(*own).momentum_buffer();
    EXPECT_EQ(moment.scalar_type(), torch::kFloat);
    return moment.item<float>();
  };
  EXPECT_EQ(steps({.opt_level = OptLevel::O3, .half_dtype = DType::bf16}, 2), 1.5F * kGradient);
  EXPECT_EQ(steps({.opt_level = OptLevel::O0}, 1), 1.75F * kGradient) << "loaded at another level";
}

TEST(LibtorchTorchOptimizer, StepsAdamWithoutMastersInF16) {
  torch::nn::Linear net(1, 1);
  libtorch::Model model(*net);
  torch::optim::Adam theirs(net->parameters(), torch::optim::AdamOptions(0.125));
  libtorch::TorchOptimizer optimizer(model, theirs);
  auto precision = libtorch::initialize(
      model, optimizer, {.opt_level = OptLevel::O3, .half_dtype = DType::f16, .loss_scale = 1.0});
  const float before = net->bias.item<float>();
  precision.backward((net->bias * 0x1p-9).sum());  // whose square f16 rounds to 0
  EXPECT_TRUE(precision.step().applied);
  EXPECT_NEAR(net->bias.item<float>(), before - 0.125F, 1e-3);
}

// ---- Recomputation

struct Trace {
  std::vector<torch::Tensor> gradients, buffers;
  torch::Tensor loss, random;
};

enum class Way { plain, recomputed, offloaded };

Trace trace(Way way, const amp::Options& options) {
  torch::manual_seed(5);
  Block net;
  libtorch::Model model(*net);
  optim::FusedAdam optimizer(model.parameters());
  auto precision = libtorch::initialize(model, optimizer, options);
  checkpointing::Offload offload({.min_bytes = 1});
  const auto x = torch::randn({16, 6});
  const auto forward = [&](const torch::Tensor& input) {
    const auto hidden = [&](const torch::Tensor& h) { return net->hidden(h); };
    return net->out(way == Way::recomputed ? libtorch::checkpoint(hidden, input) : hidden(input));
  };
  torch::Tensor loss;
  for (int i = 0; i < 2; ++i) {
    std::optional<libtorch::SavedTensorHooksGuard> hooks;
    if (way == Way::offloaded) hooks.emplace(offload.hooks());
    loss = model.run(forward, x).square().mean();
    hooks.reset();
    torch::rand({3});
    precision.backward(loss);
  }
  if (way == Way::offloaded) {
    EXPECT_GT(offload.stats().fetched_bytes, 0u);
  }
  Trace result{{}, {}, loss.detach(), torch::rand({4})};
  for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().clone());
  for (const auto& b : net->buffers()) result.buffers.push_back(b.clone());
  return result;
}

class Recomputation : public ::testing::TestWithParam<std::tuple<Way, OptLevel>> {};

TEST_P(Recomputation, HasTheSameBits) {
  const amp::Options options{.opt_level = std::get<1>(GetParam()), .half_dtype = DType::bf16};
  const Trace expected = trace(Way::plain, options), got = trace(std::get<0>(GetParam()), options);
  EXPECT_TRUE(got.loss.equal(expected.loss));
  EXPECT_TRUE(got.random.equal(expected.random));
  for (std::size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_TRUE(got.gradients[i].equal(expected.gradients[i])) << i;
  for (std::size_t i = 0; i < expected.buffers.size(); ++i)
    EXPECT_TRUE(got.buffers[i].equal(expected.buffers[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Libtorch, Recomputation,
                         ::testing::Combine(::testing::Values(Way::recomputed, Way::offloaded),
                                            ::testing::Values(OptLevel::O0, OptLevel::O1,
                                                              OptLevel::O2)));

TEST(LibtorchCheckpoint, KeepsNoActivationsAndNestsAndNamesOtherReplays) {
  const auto weight = torch::randn({8, 8}).requires_grad_();
  c10::weak_intrusive_ptr<at::TensorImpl> inner(torch::zeros({1}).getIntrusivePtr());
  const auto chain = [&](const torch::Tensor& x) {
    const auto h = torch::tanh(x.matmul(weight));
    inner = c10::weak_intrusive_ptr<at::TensorImpl>(h.getIntrusivePtr());
    return torch::tanh(h.matmul(weight));
  };
  const auto x = torch::randn({4, 8}).requires_grad_();
  auto y = libtorch::checkpoint(chain, x);
  EXPECT_TRUE(inner.expired());
  y.sum().backward();
  EXPECT_TRUE(inner.expired()) << "what a replay has made";
  const auto dx = x.grad().clone(), dw = weight.grad().clone();
  x.mutable_grad().reset(), weight.mutable_grad().reset();
  chain(x).sum().backward();
  EXPECT_TRUE(dx.equal(x.grad()));
  EXPECT_TRUE(dw.equal(weight.grad()));

  x.mutable_grad().reset();
  libtorch::checkpoint(
      [&](const torch::Tensor& a) { return libtorch::checkpoint(chain, torch::sin(a)); }, x)
      .sum()
      .backward();
  const auto nested = x.grad().clone();
  x.mutable_grad().reset();
  chain(torch::sin(x)).sum().backward();
  EXPECT_TRUE(nested.equal(x.grad()));

  int calls = 0;
  y = libtorch::checkpoint(
      [&](const torch::Tensor& a) {
        return torch::tanh(++calls == 1 ? a : a.slice(0, 0, 2)).sum();
      },
      x);
  EXPECT_THAT(message_of<core::Error>([&] { y.backward(); }),
              HasSubstr("expected a replay that saves what the first run saved"));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(libtorch::checkpoint(chain, x).requires_grad());
  }
}

/// Writes to a buffer of its own in each forward, through a view of it too.
struct AveragesImpl : torch::nn::Module {
  AveragesImpl() : mean(register_buffer("mean", torch::zeros({2, 6}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::NoGradGuard no_grad;
    mean[0].mul_(0.5).add_(x.mean(0), 0.5);
    mean[1] += 1;
    return x;
  }
  torch::Tensor mean;
};

TEST(LibtorchCheckpoint, WritesBuffersOnceOutsideOfAModelToo) {
  const auto buffers = [](int depth) {
    torch::manual_seed(6);
    Block net;
    AveragesImpl averages;
    const auto x = torch::randn({16, 6}).requires_grad_();
    const std::function<torch::Tensor(torch::Tensor)> block = [&](const torch::Tensor& in) {
      return net->forward(averages.forward(torch::sin(in)));
    };
    const std::function<torch::Tensor(torch::Tensor)> nested = [&](const torch::Tensor& in) {
      return torch::tanh(libtorch::checkpoint(block, in));
    };
    for (int i = 0; i < 2; ++i) {
      const auto y = depth == 0 ? torch::tanh(block(x))
                     : depth == 1
                         ? libtorch::checkpoint([&](auto in) { return torch::tanh(block(in)); }, x)
                         : libtorch::checkpoint(nested, x);
      y.square().sum().backward();
    }
    std::vector<torch::Tensor> all = net->buffers();
    all.push_back(averages.mean);
    for (const auto& p : net->parameters()) all.push_back(p.grad());
    all.push_back(x.grad());
    return all;
  };
  const auto expected = buffers(0);
  EXPECT_EQ(expected[2].item<std::int64_t>(), 2);
  for (const int depth : {1, 2}) {
    const auto got = buffers(depth);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(got[i].equal(expected[i])) << "depth " << depth << ", tensor " << i;
    }
  }
}

TEST(LibtorchSavedTensors, EndWithAGraphThatNoBackwardRuns) {
  const auto x = torch::randn({4}).requires_grad_();
  const autograd::SavedTensorHooks keep{
      [](const Tensor& tensor) { return std::any(tensor); },
      [](const std::any& value) { return std::any_cast<Tensor>(value); }};
  for (const bool backward : {true, false}) {
    c10::weak_intrusive_ptr<at::TensorImpl> result(torch::zeros({1}).getIntrusivePtr());
    {
      auto y = x * 1.0;  // there before: handed on as it is
      const libtorch::SavedTensorHooksGuard hooks(keep);
      y.tanh_();
      result = c10::weak_intrusive_ptr<at::TensorImpl>(y.getIntrusivePtr());
      if (backward) y.sum().backward();
    }
    EXPECT_TRUE(result.expired()) << (backward ? "backward" : "dropped");
  }
  EXPECT_LE(difference(x.grad(), 1.0 - torch::tanh(x).square()), 1e-6);
}

TEST(LibtorchSavedTensors, LeaveWhatWasThereBefore) {
  torch::manual_seed(7);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8),
                            torch::nn::GELU(), torch::nn::Linear(8, 2));
  net[2]->as<torch::nn::Linear>()->weight.set_requires_grad(false);  // frozen
  const auto x = torch::randn({4, 6}).requires_grad_();
  net->forward(x).sum().backward();
  const auto dx = x.grad().clone();
  x.mutable_grad().reset();
  std::set<const void*> before{x.data_ptr()};
  for (const auto& p : net->parameters()) before.insert(p.data_ptr());

  int packed = 0;
  {
    const libtorch::SavedTensorHooksGuard hooks(
        {[&](const Tensor& tensor) {
           EXPECT_FALSE(before.contains(tensor.raw_data()));
           ++packed;
           return std::any(tensor);
         },
         [](const std::any& value) { return std::any_cast<Tensor>(value); }});
    net->forward(x).sum().backward();
  }
  EXPECT_GE(packed, 3) << "tanh's result, and what is given to GELU and to the last layer";
  EXPECT_TRUE(x.grad().equal(dx));
}

// ---- Python's side

TEST(LibtorchPython, AutocastHasItsBitsAndFilesCrossBothWays) {
  const char* python = std::getenv("CAIRN_TORCH_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "CAIRN_TORCH_PYTHON names no Python with torch";
  const std::string folder = folder_of_test();
  CairnLoop cairn({.opt_level = OptLevel::O1, .half_dtype = DType::bf16});
  const Batch batch = batch_of(16, 0);
  StateDict data;
  data.set("x", libtorch::to_cairn(batch.data));
  data.set("y", libtorch::to_cairn(batch.target));
  checkpointing::write_torch(folder + "/start.pt",
                             {{"model", cairn.model.state_dict()}, {"batch", data}});
  const std::string command =
      std::string(python) + " -B " + test::test_folder() + "/libtorch/python_side.py " + folder;
  ASSERT_EQ(std::system(command.c_str()), 0) << command;

  const StateDict theirs = checkpointing::read_torch(folder + "/python.pt");
  const auto loss = [&] {
    const auto region = cairn.model.region();
    return torch::nll_loss(cairn.net->forward(batch.data), batch.target);
  }();
  cairn.precision.backward(loss);
  EXPECT_EQ(loss.item<double>(), theirs.tensor("loss").item());
  std::size_t compared = 0;
  for (const auto& parameter : cairn.net->named_parameters()) {
    const auto dot = parameter.key().find('.');
    const Tensor gradient = theirs.dict("gradients")
                                .dict(parameter.key().substr(0, dot))
                                .tensor(parameter.key().substr(dot + 1));
    EXPECT_TRUE(parameter.value().grad().equal(libtorch::to_torch(gradient))) << parameter.key();
    ++compared;
  }
  EXPECT_EQ(compared, 5u);
  cairn.optimizer.clear_grad();

  // Python went on for two steps; from its checkpoint both take a third.
  CairnLoop resumed({.opt_level = OptLevel::O0});
  resumed.model.load_state_dict(theirs.dict("model"));
  resumed.optimizer.load_torch_state_dict(theirs.dict("optimizer"));
  resumed.step(batch);
  for (const auto& parameter : resumed.net->named_parameters()) {
    const auto dot = parameter.key().find('.');
    const Tensor weight = theirs.dict("third")
                              .dict(parameter.key().substr(0, dot))
                              .tensor(parameter.key().substr(dot + 1));
    EXPECT_LE(difference(parameter.value(), libtorch::to_torch(weight)), 1e-6) << parameter.key();
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace cairn::test
