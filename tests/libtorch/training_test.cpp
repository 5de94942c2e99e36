// Levels, gradients and steps of a libtorch model, against a plain f32 loop of libtorch's.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

#include <functional>

#include "cairn/core/error.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/optimizer_access.h"
#include "cairn/optim/weight_average.h"
#include "libtorch/support.h"
#include "support/message_of.h"

namespace cairn::test {
namespace {

using amp::OptLevel;
using ::testing::HasSubstr;

struct Level {
  OptLevel level;
  DType half;
  double gradients, weights;  // allowed differences from f32
};
std::ostream& operator<<(std::ostream& out, const Level& level) {
  return out << amp::name(level.level) << "_" << level.half;
}

class Levels : public ::testing::TestWithParam<Level> {};

TEST_P(Levels, GradientsAndThreeStepsAreThoseOfAPlainLoop) {
  PlainLoop plain;
  CairnLoop cairn({.opt_level = GetParam().level,
                   .half_dtype = GetParam().half,
                   .scaler = {.init_scale = 256}});
  const Batch first = batch_of(16, 0);
  plain.loss(first).backward();
  cairn.precision.backward(cairn.loss(first));
  for (const auto& parameter : plain.net->named_parameters()) {
    for (const auto& ours : cairn.model.parameters()) {
      if (ours.name != parameter.key()) continue;
      const auto gradient = libtorch::to_torch(cairn.precision.unscaled_gradient(ours.tensor));
      EXPECT_LE(difference(gradient, parameter.value().grad()), GetParam().gradients) << ours.name;
    }
  }
  cairn.optimizer.clear_grad();
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const Batch batch = batch_of(16, i);
    const double expected = plain.step(batch);
    EXPECT_NEAR(cairn.step(batch), expected, GetParam().weights * 4 + 1e-5) << "step " << i;
    EXPECT_TRUE(cairn.result.applied) << cairn.result.reason;
  }
  for (const auto& parameter : plain.net->named_parameters()) {
    // Adam's first steps have the size of lr whatever the gradient's: noise in small ones shows.
    const double largest =
        (cairn.exact(parameter.key()) - parameter.value()).abs().max().item<double>();
    EXPECT_LE(largest, GetParam().weights) << parameter.key();
  }
  EXPECT_EQ(cairn.net->norm->num_batches_tracked.item<std::int64_t>(), 4);
}

INSTANTIATE_TEST_SUITE_P(Libtorch, Levels,
                         ::testing::Values(Level{OptLevel::O0, DType::bf16, 0, 2e-6},
                                           Level{OptLevel::O1, DType::bf16, 0.05, 0.03},
                                           Level{OptLevel::O1, DType::f16, 0.01, 0.03},
                                           Level{OptLevel::O2, DType::bf16, 0.05, 0.03},
                                           Level{OptLevel::O2, DType::f16, 0.01, 0.03},
                                           Level{OptLevel::O3, DType::bf16, 0.08, 0.04}),
                         ::testing::PrintToStringParamName());

TEST(LibtorchModel, IsCastInPlaceWithBatchNormsKept) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  EXPECT_EQ(cairn.net->conv->weight.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(cairn.net->norm->weight.scalar_type(), torch::kFloat);
  EXPECT_EQ(cairn.net->norm->running_mean.scalar_type(), torch::kFloat);
  const PlainLoop plain;
  EXPECT_TRUE(cairn.exact("conv.weight").equal(plain.net->conv->weight)) << "masters are exact";
  cairn.step(batch_of(4, 0));
  cairn.precision.release();
  EXPECT_EQ(cairn.net->conv->weight.scalar_type(), torch::kFloat);
  EXPECT_EQ(cairn.net->forward(batch_of(4, 0).data).scalar_type(), torch::kFloat);

  CairnLoop o3({.opt_level = OptLevel::O3, .half_dtype = DType::bf16});
  EXPECT_EQ(o3.net->norm->weight.scalar_type(), torch::kBFloat16);
  CairnLoop overridden(
      {.opt_level = OptLevel::O3, .half_dtype = DType::bf16, .keep_batchnorm_fp32 = true});
  EXPECT_EQ(overridden.net->norm->weight.scalar_type(), torch::kFloat);
}

TEST(LibtorchModel, IsReleasedWithWhatWasWrittenBefore) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  {
    const torch::NoGradGuard no_grad;
    cairn.net->conv->weight.fill_(0.5);
  }
  cairn.precision.release();
  EXPECT_TRUE(cairn.net->conv->weight.eq(0.5).all().item<bool>());
}

TEST(LibtorchModel, CastsInputsAndOutputsInAnyNesting) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  using Inner = std::map<std::string, std::vector<torch::Tensor>>;
  const auto forward = [](std::pair<torch::Tensor, Inner> x, std::optional<torch::Tensor> y, int n,
                          const torch::Tensor& index) {
    EXPECT_EQ(x.first.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(x.second.at("a").at(0).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(y->scalar_type(), torch::kBFloat16);
    EXPECT_EQ(index.scalar_type(), torch::kLong);
    EXPECT_EQ(n, 7);
    return std::make_tuple(x.first + 1, std::vector<torch::Tensor>{*y}, index);
  };
  const auto x = torch::ones({2});
  const auto [a, b, c] = cairn.model.run(forward, std::pair{x, Inner{{"a", {x}}}}, std::optional(x),
                                         7, torch::ones({1}, torch::kLong));
  EXPECT_EQ(a.scalar_type(), torch::kFloat);
  EXPECT_EQ(b.at(0).scalar_type(), torch::kFloat);
  EXPECT_EQ(c.scalar_type(), torch::kLong);
}

TEST(LibtorchModel, GradientsLieInTheArenaAndStayThere) {
  CairnLoop cairn({.opt_level = OptLevel::O0});
  const Batch batch = batch_of(8, 0);
  cairn.precision.backward(cairn.loss(batch));
  const Tensor& first = cairn.optimizer.groups().front().parameters.front().tensor;
  const auto& buffers = optim::GradientArena::of(first)->buffers();
  ASSERT_EQ(buffers.size(), 1u);
  const auto* begin = buffers[0].data.data<float>();
  std::vector<torch::Tensor> before;
  for (const auto& x : cairn.net->parameters()) {
    const auto* at = x.grad().data_ptr<float>();
    EXPECT_TRUE(at >= begin && at < begin + buffers[0].data.numel());
    before.push_back(x.grad().clone());
  }
  cairn.precision.backward(cairn.loss(batch));  // adds up, in place
  std::size_t i = 0;
  for (const auto& x : cairn.net->parameters())
    EXPECT_LE(difference(x.grad(), 2 * before[i++]), 1e-6);
  EXPECT_TRUE(cairn.precision.step().applied);
  for (const auto& x : cairn.net->parameters()) EXPECT_FALSE(x.grad().defined());
}

TEST(LibtorchModel, AccumulatesHalfGradientsInF32) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  PlainLoop plain;
  optim::Accumulation accumulation({.steps = 4});
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Batch batch = batch_of(4, i);
    auto micro = accumulation.begin(4);
    cairn.precision.backward(cairn.loss(batch), {.weight = micro.weight()});
    plain.loss(batch).div(4).backward();
  }
  EXPECT_EQ(cairn.net->fc->weight.grad().scalar_type(), torch::kFloat);
  const double scale = accumulation.finish();
  EXPECT_LE(difference(cairn.net->fc->weight.grad() * scale, plain.net->fc->weight.grad()), 0.03);
  EXPECT_TRUE(cairn.precision.step({.gradient_scale = scale}).applied);
}

TEST(LibtorchModel, ClipsAsLibtorchDoes) {
  CairnLoop cairn({.opt_level = OptLevel::O0});
  PlainLoop plain;
  const Batch batch = batch_of(16, 3);
  plain.loss(batch).backward();
  const double norm = torch::nn::utils::clip_grad_norm_(plain.net->parameters(), 0.1);
  cairn.step(batch, {.max_gradient_norm = 0.1});
  EXPECT_NEAR(cairn.result.gradient_norm, norm, 1e-5 * norm);
  EXPECT_NEAR(cairn.result.clip_coefficient, 0.1 / (norm + 1e-6), 1e-5);
}

TEST(LibtorchModel, AnOverflowIsSkippedAndNamed) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::f16});
  const auto before = cairn.exact("fc.weight").clone();
  const double scale = cairn.precision.loss_scale();
  Batch batch = batch_of(4, 0);
  const auto loss = cairn.loss(batch) * 1e8;
  cairn.precision.backward(loss);
  const optim::StepResult result = cairn.precision.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.culprit, "conv.weight");
  EXPECT_THAT(result.reason, HasSubstr("in the gradient of conv.weight"));
  EXPECT_EQ(cairn.precision.loss_scale(), scale / 2);
  EXPECT_TRUE(cairn.exact("fc.weight").equal(before));
  cairn.step(batch);
  EXPECT_TRUE(cairn.result.applied);
}

TEST(LibtorchModel, LossesHaveScalesOfTheirOwn) {
  CairnLoop cairn({.opt_level = OptLevel::O2,
                   .half_dtype = DType::f16,
                   .scaler = {.init_scale = 256},
                   .num_losses = 2});
  PlainLoop plain;
  const Batch a = batch_of(8, 0), b = batch_of(8, 1);
  (plain.loss(a) + 2 * plain.loss(b)).backward();
  cairn.precision.backward(cairn.loss(a), {.loss_id = 0});
  cairn.precision.backward(2 * cairn.loss(b), {.loss_id = 1});
  for (const auto& ours : cairn.model.parameters()) {
    if (ours.name != "fc.weight") continue;
    const auto sum = libtorch::to_torch(cairn.precision.unscaled_gradient(ours.tensor));
    EXPECT_LE(difference(sum, plain.net->fc->weight.grad()), 0.01);
  }
  EXPECT_TRUE(cairn.precision.step().applied);
}

/// Throws in its backward.
struct Throws : torch::autograd::Function<Throws> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list&) {
    throw std::runtime_error("no gradient today");
  }
};

TEST(LibtorchModel, IsUsableAfterAnException) {
  CairnLoop cairn({.opt_level = OptLevel::O1, .half_dtype = DType::bf16});
  CairnLoop undisturbed({.opt_level = OptLevel::O1, .half_dtype = DType::bf16});
  const Batch batch = batch_of(8, 0);
  const auto throws = [](const torch::Tensor& x) -> torch::Tensor {
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    return x.matmul(torch::ones({17, 17}));
  };
  EXPECT_THROW(cairn.model.run(throws, batch.data), c10::Error);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(torch::GradMode::is_enabled());

  const auto hidden = cairn.net->conv->forward(batch.data);
  EXPECT_THROW(cairn.precision.backward(Throws::apply(hidden).sum() + cairn.net->fc->bias.sum()),
               std::runtime_error);
  EXPECT_TRUE(torch::GradMode::is_enabled());
  EXPECT_FALSE(optim::OptimizerAccess(cairn.optimizer).has_gradient())
      << "fc.bias had one before the throw";

  EXPECT_EQ(cairn.step(batch), undisturbed.step(batch));
  EXPECT_EQ(cairn.step(batch), undisturbed.step(batch));
}

TEST(LibtorchModel, RefusesWhatItCouldNotFollow) {
  CairnLoop cairn({.opt_level = OptLevel::O0});
  const Batch batch = batch_of(4, 0);
  EXPECT_THAT(message_of([&] { cairn.loss(batch).backward(); }),
              HasSubstr("precision.backward(loss)"));
  cairn.net->zero_grad();
  EXPECT_THAT(message_of([&] { cairn.precision.backward(torch::ones({1})); }),
              HasSubstr("depends on a parameter of the model"));
  EXPECT_THAT(message_of([&] { libtorch::Model again(*cairn.net); }), HasSubstr("conv.weight"));
  EXPECT_THAT(message_of([&] { cairn.precision.backward(cairn.net->forward(batch.data)); }),
              HasSubstr("one floating element"));
  cairn.net->to(torch::kDouble);
  EXPECT_THAT(message_of([&] { cairn.step(batch); }),
              HasSubstr("'conv.weight' to stay where it was"));
}

TEST(LibtorchModel, FollowsFreezingAndWritesInPlace) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  const Batch batch = batch_of(8, 0);
  cairn.net->conv->weight.set_requires_grad(false);
  const auto frozen = cairn.exact("conv.weight").clone();
  cairn.step(batch);
  EXPECT_TRUE(cairn.exact("conv.weight").equal(frozen));
  cairn.net->conv->weight.set_requires_grad(true);
  cairn.step(batch);
  cairn.step(batch);
  EXPECT_FALSE(cairn.exact("conv.weight").equal(frozen));
  {
    const torch::NoGradGuard no_grad;
    cairn.net->fc->weight.clamp_(-0.01, 0.01);
  }
  cairn.step(batch);
  EXPECT_LE(cairn.exact("fc.weight").abs().max().item<double>(), 0.01 + 2 * 1e-2);
}

TEST(LibtorchModel, FollowsZeroGrad) {
  CairnLoop cairn({.opt_level = OptLevel::O0}), undisturbed({.opt_level = OptLevel::O0});
  const Batch first = batch_of(8, 0), second = batch_of(8, 1);
  cairn.precision.backward(torch::nll_loss(cairn.net->forward(first.data), first.target));
  cairn.net->zero_grad();
  EXPECT_FALSE(cairn.precision.step().applied) << "there is no gradient";
  cairn.precision.backward(torch::nll_loss(cairn.net->forward(first.data), first.target));
  cairn.net->zero_grad();
  cairn.step(second);
  undisturbed.step(second);
  EXPECT_TRUE(cairn.exact("fc.weight").equal(undisturbed.exact("fc.weight")));
}

/// A step without amp: what libtorch's side has changed before it, and what it hears after it.
TEST(LibtorchModel, FollowsAroundAPlainStep) {
  torch::nn::Linear net(3, 1);
  libtorch::Model model(*net);
  optim::FusedAdam optimizer(model.parameters(), {.lr = 0.5});
  const auto x = torch::ones({2, 3});
  const auto loss = [&] { return model.run(net, x).sum(); };
  const auto weight = net->weight.clone(), bias = net->bias.clone();

  model.backward(loss());
  net->zero_grad();
  EXPECT_FALSE(optimizer.step().applied) << "there is no gradient";
  EXPECT_TRUE(net->weight.equal(weight));

  model.backward(loss());
  net->weight.set_requires_grad(false);
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_TRUE(net->weight.equal(weight)) << "frozen";
  EXPECT_FALSE(net->bias.equal(bias));
  EXPECT_FALSE(net->bias.grad().defined());
  net->weight.set_requires_grad(true);

  const auto stale = (net->weight * net->weight).sum();
  model.backward(loss());
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_FALSE(net->weight.grad().defined());
  EXPECT_THAT(message_of<std::exception>([&] { model.backward(stale); }),
              HasSubstr("modified by an inplace operation"));

  model.backward(loss());
  net->to(torch::kDouble);
  EXPECT_THAT(message_of([&] { (void)optimizer.step(); }),
              HasSubstr("'weight' to stay where it was"));
}

TEST(LibtorchModel, TrainsTwoModelsWithThreeLosses) {
  torch::manual_seed(3);
  torch::nn::Linear g(4, 6), d(6, 1);
  libtorch::Model g_model(*g), d_model(*d);
  optim::FusedAdam g_optimizer(g_model.parameters(), {.lr = 1e-2}),
      d_optimizer(d_model.parameters(), {.lr = 1e-2});
  auto precision = libtorch::initialize({&d_model, &g_model}, {&d_optimizer, &g_optimizer},
                                        {.opt_level = OptLevel::O2,
                                         .half_dtype = DType::f16,
                                         .scaler = {.init_scale = 256},
                                         .num_losses = 3});
  const auto run = [](libtorch::Model& model, torch::nn::Linear& layer, const torch::Tensor& x) {
    return model.run([&](const torch::Tensor& input) { return layer->forward(input); }, x);
  };
  const auto g_before = g->weight.clone(), d_before = d->weight.clone();
  for (int i = 0; i < 2; ++i) {
    const auto fake = run(g_model, g, torch::randn({8, 4}));
    precision.backward(torch::softplus(-run(d_model, d, torch::randn({8, 6}))).mean(),
                       {.loss_id = 0, .optimizers = {&d_optimizer}});
    precision.backward(torch::softplus(run(d_model, d, fake.detach())).mean(),
                       {.loss_id = 1, .optimizers = {&d_optimizer}});
    EXPECT_TRUE(precision.step(d_optimizer).applied);
    precision.backward(torch::softplus(-run(d_model, d, fake)).mean(),
                       {.loss_id = 2, .optimizers = {&g_optimizer}});
    EXPECT_TRUE(precision.step(g_optimizer).applied);
    d_optimizer.clear_grad();
  }
  EXPECT_FALSE(g->weight.equal(g_before));
  EXPECT_FALSE(d->weight.equal(d_before));
}

TEST(LibtorchAutocast, NestsAndRestores) {
  const auto a = torch::ones({4, 4});
  EXPECT_EQ(a.matmul(a).scalar_type(), torch::kFloat);
  {
    const libtorch::AutocastGuard outer(at::kCPU, torch::kBFloat16);
    EXPECT_EQ(a.matmul(a).scalar_type(), torch::kBFloat16);
    {
      const libtorch::AutocastGuard off(at::kCPU, torch::kBFloat16, false);
      EXPECT_EQ(a.matmul(a).scalar_type(), torch::kFloat);
      const libtorch::AutocastGuard half(at::kCPU, torch::kHalf);
      EXPECT_EQ(a.matmul(a).scalar_type(), torch::kHalf);
    }
    EXPECT_EQ(a.matmul(a).scalar_type(), torch::kBFloat16);
  }
  EXPECT_EQ(a.matmul(a).scalar_type(), torch::kFloat);
  EXPECT_THROW(libtorch::AutocastGuard(at::kCPU, torch::kFloat), core::InvalidArgument);
}

const amp::Options kWritesO2{
    .opt_level = OptLevel::O2, .half_dtype = DType::f16, .scaler = {.init_scale = 1024}};

TEST(LibtorchWrites, AClipOfScaledGradientsIsRefused) {
  CairnLoop cairn(kWritesO2);
  cairn.precision.backward(cairn.loss(batch_of(16, 0)));
  torch::nn::utils::clip_grad_norm_(cairn.net->parameters(), 0.01);
  EXPECT_THAT(message_of<core::InvalidArgument>([&] { (void)cairn.precision.step(); }),
              ::testing::AllOf(HasSubstr("1024"), HasSubstr("unscale"), HasSubstr("'conv")));
  cairn.net->zero_grad();
  cairn.precision.backward(cairn.loss(batch_of(16, 1)));
  EXPECT_TRUE(cairn.precision.step().applied);
}

TEST(LibtorchWrites, UnscaledGradientsAreClippedAsInAPlainLoop) {
  CairnLoop cairn(kWritesO2);
  const Batch batch = batch_of(16, 0);
  cairn.precision.backward(cairn.loss(batch));
  cairn.precision.unscale(cairn.optimizer);
  PlainLoop plain;
  plain.loss(batch).backward();
  const double norm = torch::nn::utils::clip_grad_norm_(plain.net->parameters(), 0.01);
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(cairn.net->parameters(), 0.01), norm, 0.02 * norm);
  const optim::StepResult result = cairn.precision.step();
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_NEAR(result.gradient_norm, 0.01, 1e-4);
  EXPECT_FALSE(cairn.net->fc->bias.grad().defined());
}

TEST(LibtorchWrites, GradientsAtNoScaleMayBeEdited) {
  CairnLoop cairn({.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  cairn.precision.backward(cairn.loss(batch_of(16, 0)));
  torch::nn::utils::clip_grad_norm_(cairn.net->parameters(), 0.01);
  const optim::StepResult result = cairn.precision.step();
  EXPECT_TRUE(result.applied);
  EXPECT_NEAR(result.gradient_norm, 0.01, 1e-3);
}

TEST(LibtorchWrites, AWriteBehindTheFirstElementsIsRefused) {
  CairnLoop cairn(kWritesO2);
  cairn.precision.backward(cairn.loss(batch_of(16, 0)));
  cairn.net->fc->weight.grad().flatten().slice(0, 100).mul_(0.5);
  EXPECT_THAT(message_of<core::InvalidArgument>([&] { (void)cairn.precision.step(); }),
              HasSubstr("'fc.weight'"));
}

TEST(LibtorchWrites, AveragesMayBeUsedWithinAWindow) {
  CairnLoop cairn(kWritesO2), undisturbed(kWritesO2);
  optim::WeightAverage average(cairn.model.parameters());
  for (const int micro_batch : {0, 1}) {
    const Batch batch = batch_of(16, static_cast<std::uint64_t>(micro_batch));
    cairn.precision.backward(cairn.loss(batch));
    undisturbed.precision.backward(undisturbed.loss(batch));
    const optim::AveragesInUse averages = average.use();
    const torch::NoGradGuard no_grad;
    cairn.net->eval();
    cairn.loss(batch);
    cairn.net->train();
  }
  EXPECT_TRUE(cairn.precision.step().applied);
  EXPECT_TRUE(undisturbed.precision.step().applied);
  EXPECT_TRUE(cairn.exact("fc.weight").equal(undisturbed.exact("fc.weight")));
}

TEST(LibtorchWrites, WeightsMayBeClampedAfterAStepThatKeepsItsGradients) {
  CairnLoop cairn(kWritesO2);
  cairn.precision.backward(cairn.loss(batch_of(16, 0)));
  EXPECT_TRUE(cairn.precision.step({.keep_gradients = true}).applied);
  {
    const torch::NoGradGuard no_grad;
    for (auto& x : cairn.net->parameters()) x.clamp_(-0.5, 0.5);
  }
  cairn.precision.backward(cairn.loss(batch_of(16, 1)));
  EXPECT_TRUE(cairn.precision.step().applied);
}

TEST(LibtorchWrites, ZeroedGradientsAreZero) {
  CairnLoop cairn(kWritesO2);
  cairn.precision.backward(cairn.loss(batch_of(16, 0)));
  cairn.net->zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(cairn.precision.step().gradient_norm, 0.0);
}

TEST(LibtorchWrites, OfAPartOfAGradientAreRefused) {
  amp::Options f16 = kWritesO2, bf16{.opt_level = OptLevel::O2, .half_dtype = DType::bf16};
  for (amp::Options options : {f16, bf16}) {
    options.num_losses = 2;
    CairnLoop cairn(options);
    const auto two_backwards = [&] {
      for (const int loss : {0, 1})
        cairn.precision.backward(cairn.loss(batch_of(16, static_cast<std::uint64_t>(loss))),
                                 {.loss_id = loss});
    };
    const auto clip = [&] { torch::nn::utils::clip_grad_norm_(cairn.net->parameters(), 0.01); };
    const auto zero = [&] { cairn.net->zero_grad(/*set_to_none=*/false); };
    for (const std::function<void()>& edit : {std::function<void()>(clip), {zero}}) {
      two_backwards();
      edit();
      EXPECT_THAT(message_of<core::InvalidArgument>([&] { (void)cairn.precision.step(); }),
                  ::testing::AllOf(HasSubstr("precision.unscale(optimizer)"),
                                   HasSubstr("zero_grad()"), HasSubstr("'conv")));
      cairn.net->zero_grad();
    }
    two_backwards();
    cairn.precision.unscale(cairn.optimizer);
    clip();
    EXPECT_NEAR(cairn.precision.step().gradient_norm, 0.01, 1e-4);
    two_backwards();
    cairn.precision.unscale(cairn.optimizer);
    zero();
    EXPECT_EQ(cairn.precision.step().gradient_norm, 0.0);
  }
}

TEST(LibtorchModel, AGraphMayBeRetainedForAnotherBackward) {
  CairnLoop once({.opt_level = OptLevel::O0}), twice({.opt_level = OptLevel::O0});
  const Batch batch = batch_of(16, 0);
  once.precision.backward(once.loss(batch));
  const auto loss = twice.loss(batch);
  twice.precision.backward(loss, {.retain_graph = true});
  twice.precision.backward(loss);
  const auto gradients = once.net->named_parameters();
  for (const auto& x : twice.net->named_parameters()) {
    EXPECT_TRUE(x.value().grad().equal(2 * gradients[x.key()].grad())) << x.key();
  }
  EXPECT_THAT(message_of<std::exception>([&] { twice.precision.backward(loss); }),
              HasSubstr("a second time"));
}

TEST(LibtorchWrites, ATorchOptimizerLeftInTheLoopIsRefused) {
  CairnLoop cairn(kWritesO2);
  torch::optim::SGD left(cairn.net->parameters(), torch::optim::SGDOptions(0.01));
  cairn.precision.backward(cairn.loss(batch_of(16, 0)));
  left.step();
  EXPECT_THAT(message_of<core::InvalidArgument>([&] { (void)cairn.precision.step(); }),
              HasSubstr("torch::optim"));
  cairn.net->zero_grad();
  {
    const torch::NoGradGuard no_grad;
    for (auto& x : cairn.net->parameters()) x.clamp_(-0.5, 0.5);  // between two steps
  }
  cairn.precision.backward(cairn.loss(batch_of(16, 1)));
  EXPECT_TRUE(cairn.precision.step().applied);
}

TEST(LibtorchTensors, CrossWithoutACopyBothWays) {
  const auto theirs = torch::arange(24, torch::kFloat).reshape({2, 3, 4}).transpose(0, 2);
  const Tensor ours = libtorch::to_cairn(theirs);
  EXPECT_EQ(ours.raw_data(), theirs.data_ptr());
  EXPECT_EQ(ours.shape(), (Shape{4, 3, 2}));
  EXPECT_EQ(ours.strides(), (Shape{1, 4, 12}));
  const auto back = libtorch::to_torch(ours);
  EXPECT_TRUE(back.equal(theirs));
  EXPECT_EQ(back.data_ptr(), theirs.data_ptr());

  Tensor gone = Tensor::full({3}, 2.5);
  const auto keeps = libtorch::to_torch(gone);
  gone = Tensor();
  EXPECT_TRUE(keeps.equal(torch::full({3}, 2.5)));
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i16, DType::i32,
                            DType::i64, DType::u8, DType::boolean}) {
    EXPECT_EQ(libtorch::to_cairn(libtorch::to_torch(dtype)), dtype);
    EXPECT_EQ(libtorch::to_torch(Tensor::zeros({2}, dtype)).scalar_type(),
              libtorch::to_torch(dtype));
  }
  EXPECT_THROW(libtorch::to_cairn(torch::Tensor()), core::InvalidArgument);
  EXPECT_THROW(libtorch::to_cairn(torch::zeros({2}, torch::kComplexFloat)), core::InvalidArgument);
  EXPECT_THROW(libtorch::to_cairn(torch::zeros({2, 2}).to_sparse()), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::test
