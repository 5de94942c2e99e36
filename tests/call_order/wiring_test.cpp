// What a job is wired from: names, fallback, regions and casts, one handle for the others.
#include "support.h"

namespace cairn::orders {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Fallback, AModelOfOneLayerFallsBack) {
  nn::Linear model(4, 4);
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.0});
  amp::Amp precision = amp::initialize(
      model, optimizer,
      {.opt_level = amp::OptLevel::O2, .scaler = {.init_scale = 1024}, .fallback_after = 2});
  kernels::fill(model.weight(), 3.0);
  for (int step = 0; step < 4; ++step) {
    precision.backward(autograd::mean(model(Tensor::full({2, 4}, 6e4))));
    (void)precision.step();
  }
  EXPECT_THAT(precision.fp32_layers(), ElementsAre("Linear"));
}

TEST(Fallback, LeavesTheNamesOfParametersAlone) {
  nn::Sequential model(nn::Linear(2, 2), nn::Sequential(nn::Linear(2, 2)));
  optim::FusedSGD optimizer(model.parameters());
  (void)amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O1, .fallback_after = 1});
  for (const NamedTensor& parameter : model.parameters()) {
    EXPECT_EQ(parameter.tensor.name(), parameter.name);
  }
  model.at(1).parameters();  // a getter names nothing
  EXPECT_EQ(model.parameters()[2].tensor.name(), "1.0.weight");
}

TEST(Fallback, RanksFallBackTogether) {
  std::vector<std::string> layers[2];
  on_ranks(2, [&](parallel::ProcessGroup& group) {
    core::manual_seed(1);
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    parallel::DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.0});
    amp::Amp precision = amp::initialize(model, optimizer,
                                         {.opt_level = amp::OptLevel::O2,
                                          .scaler = {.init_scale = 1.0},
                                          .world = ddp.world(),
                                          .fallback_after = 2});
    kernels::fill(model.parameters()[0].tensor, 3.0);
    for (int step = 0; step < 4; ++step) {
      const double x = group.rank() == 1 ? 6e4 : 1.0;  // one rank's layer overflows
      precision.backward(autograd::mean(ddp(Tensor::full({2, 4}, x))));
      (void)precision.step();
    }
    layers[group.rank()] = precision.fp32_layers();
  });
  EXPECT_THAT(layers[0], ElementsAre("0"));
  EXPECT_EQ(layers[0], layers[1]);
}

TEST(Casts, LossesTakeAHalfOutputAndAnF32Target) {
  for (const DType half : {DType::f16, DType::bf16}) {
    Tensor x = Tensor::full({3}, 0.5, half);
    x.set_requires_grad(true);
    const Tensor target = Tensor::full({3}, 0.25);
    for (const auto loss : {&nn::mse_loss, &nn::bce_with_logits, &nn::binary_cross_entropy}) {
      const Tensor value = loss(x, target, nn::Reduction::mean);
      EXPECT_EQ(value.dtype(), DType::f32);
      autograd::backward(value);
      EXPECT_EQ(x.grad().dtype(), half);
    }
  }
}

TEST(Casts, ARegionServesWhatIsNotOneTensorInOneOut) {
  for (const auto level : {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2}) {
    nn::LSTM lstm(4, 8);
    optim::FusedSGD optimizer(lstm.parameters());
    amp::Amp precision =
        amp::initialize(lstm, optimizer, {.opt_level = level, .half_dtype = DType::bf16});
    const auto run = [&] {
      const amp::Region region = precision.region();
      return lstm.run(precision.cast(Tensor::full({3, 2, 4}, 0.5))).y;
    };
    const Tensor y = run();
    EXPECT_EQ(y.dtype(), level == amp::OptLevel::O0 ? DType::f32 : DType::bf16);
    precision.backward(nn::mse_loss(y, Tensor::zeros(y.shape())));
    EXPECT_TRUE(precision.step().applied);
    EXPECT_EQ(autograd::matmul(Tensor::zeros({8, 8}), Tensor::zeros({8, 8})).dtype(), DType::f32);
  }
}

TEST(Wiring, OneHandleIsAllThatAStepOfTwoRanksNeeds) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    parallel::DistributedDataParallel ddp(model, group);
    const World world = ddp.world();
    amp::Amp precision = amp::initialize(
        model, optimizer,
        {.opt_level = amp::OptLevel::O2, .scaler = {.init_scale = 1024}, .world = world});
    optim::Accumulation accumulation({.steps = 2, .world = world});
    const auto window = [&](float x) {
      for (int k = 0; k < 2; ++k) {
        const auto micro = accumulation.begin(1);
        precision.backward(ddp(input(x)), {.weight = micro.weight()});
      }
      return precision.step({.gradient_scale = accumulation.finish()});
    };
    EXPECT_TRUE(window(static_cast<float>(group.rank() + 1)).applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.15, 1e-6);
    EXPECT_THAT(window(group.rank() == 1 ? kInf : 1.0F).reason,
                HasSubstr("inf in the gradient of a (4 elements) on rank 1"));
  });
}

/// A step of a DDP over `averaging` whose amp asks `asked`.
optim::StepResult step_of(const parallel::ProcessGroup& averaging, const World& asked) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  parallel::DistributedDataParallel ddp(model, averaging);
  amp::Amp precision = amp::initialize(model, optimizer, {.world = asked});
  precision.backward(ddp(input(1.0F)));
  return precision.step();
}

TEST(Wiring, AmpsWorldHasAllWhoAverage) {
  std::string said[3];
  on_ranks(3, [&](parallel::ProcessGroup& all) {
    const parallel::ProcessGroup part = all.split(all.rank() == 2 ? 1 : 0);
    EXPECT_TRUE(step_of(part, all.world()).applied);  // more than needed does no harm
    said[all.rank()] = refusal([&] { (void)step_of(all, part.world()); });
  });
  for (const std::string& text : said)
    EXPECT_THAT(text, HasSubstr("averaged (ranks 0, 1, 2), got"));
  EXPECT_THAT(said[0], HasSubstr("got a world of 2 (ranks 0, 1)"));
  EXPECT_THAT(said[1], HasSubstr("got a world of 2 (ranks 0, 1)"));
  EXPECT_THAT(said[2], HasSubstr("got a world of one"));
}

/// A step of two models, averaged over the groups of ranks 0 and 1 and of ranks 1 and 2, whose amp
/// asks the first group or all ranks.
optim::StepResult step_of_two(const parallel::ProcessGroup& all, bool asks_all) {
  const parallel::ProcessGroup left = all.split(all.rank() == 2 ? 1 : 0);
  const parallel::ProcessGroup right = all.split(all.rank() == 0 ? 1 : 0);
  Pair one, other;
  optim::FusedSGD sgd(one.parameters(), {.lr = 0.1}), other_sgd(other.parameters(), {.lr = 0.1});
  parallel::DistributedDataParallel ddp(one, left), other_ddp(other, right);
  amp::Amp precision = amp::initialize({&one, &other}, {&sgd, &other_sgd},
                                       {.world = asks_all ? all.world() : ddp.world()});
  const Tensor x = input(all.rank() + 1);
  precision.backward(autograd::add(ddp(x), other_ddp(x)));
  const optim::StepResult result = precision.step();
  const double expected[][2] = {{1.5, 1.0}, {1.5, 2.5}, {3.0, 2.5}};  // means over each group
  EXPECT_NEAR(value(one.a()), 1.1 - 0.1 * expected[all.rank()][0], 1e-6);
  EXPECT_NEAR(value(other.a()), 1.1 - 0.1 * expected[all.rank()][1], 1e-6);
  return result;
}

TEST(Wiring, AmpOfTwoGroupsThatOverlapAsksTheRanksOfBoth) {
  std::string said[3];
  on_ranks(3, [&](parallel::ProcessGroup& all) {
    EXPECT_TRUE(step_of_two(all, true).applied);
    said[all.rank()] = refusal([&] { (void)step_of_two(all, false); });
  });
  for (const std::string& text : said)
    EXPECT_THAT(text, HasSubstr("averaged (ranks 1, 2), got a world of "));
  EXPECT_THAT(said[0], HasSubstr("world of 2 (ranks 0, 1)"));
  EXPECT_THAT(said[1], HasSubstr("world of 2 (ranks 0, 1)"));
  EXPECT_THAT(said[2], HasSubstr("world of one"));
}

TEST(Wiring, RanksInitializeAmpWithTheSameOptions) {
  const amp::Options one{.loss_scale = 512};  // steps that check nothing compare nothing either
  const amp::Options other{.loss_scale = 1024};
  amp::Options first, hesitates, softmax_f32, softmax_half;
  hesitates.scaler.hysteresis = 2;
  softmax_f32.cast_policies = {{"softmax", autograd::CastPolicy::f32}};
  softmax_half.cast_policies = {{"softmax", autograd::CastPolicy::half}};
  const amp::Options off{.enabled = false};
  const amp::Options clips{.enabled = false, .max_gradient_norm = 1.0};
  for (const auto& [mine, its] : {std::pair{one, other}, std::pair{first, hesitates},
                                  std::pair{softmax_f32, softmax_half}, std::pair{off, clips}}) {
    std::string said[2];
    on_ranks(2, [&, mine = mine, its = its](parallel::ProcessGroup& group) {
      Pair model;
      optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
      amp::Options options = group.rank() == 0 ? mine : its;
      options.world = group.world();
      said[group.rank()] = refusal([&] { (void)amp::initialize(model, optimizer, options); });
    });
    EXPECT_EQ(said[0], said[1]);
    EXPECT_THAT(said[0], HasSubstr("expected the same options on every rank, got '" +
                                   amp::describe(amp::resolve(mine))));
  }
}

TEST(Wiring, AWorldThatOutlivesItsDdpSaysSo) {
  World world;
  on_ranks(2, [&](parallel::ProcessGroup& group) {
    Pair model;
    const parallel::DistributedDataParallel ddp(model, group);
    if (group.rank() == 0) world = ddp.world();
  });
  EXPECT_THAT(refusal([&] { world.sum(1.0, "nothing"); }), HasSubstr("has ended"));
}

}  // namespace
}  // namespace cairn::orders
