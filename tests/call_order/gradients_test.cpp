// Who owns a gradient: orders of calls that once trained silently wrong.
#include "support.h"

#include "cairn/checkpointing/training_state.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/optimizer_access.h"
#include "support/state.h"
#include "support/step.h"

namespace cairn::orders {
namespace {

using core::GradientSlot;
using testing::HasSubstr;

const amp::Options kO2{.opt_level = amp::OptLevel::O2, .scaler = {.init_scale = 1024}};

amp::Options with(amp::Options options, const World& world) {
  options.world = world;
  return options;
}

// Rank r's gradient is r + 1: the average over two ranks is 1.5.
double own(const parallel::ProcessGroup& group) {
  return group.rank() + 1.0;
}

TEST(Gradients, ALayerUnfrozenAfterDdpWasMadeIsReduced) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    model.b().set_requires_grad(false);
    parallel::DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    autograd::backward(ddp(input(own(group))));
    test::expect_applied(optimizer.step());
    model.b().set_requires_grad(true);
    autograd::backward(ddp(input(own(group))));
    EXPECT_EQ(model.b().gradient_slot().state(), GradientSlot::State::reduced);
    test::expect_applied(optimizer.step());
    EXPECT_NEAR(value(model.a()), 1.1 - 0.3, 1e-6);
    EXPECT_NEAR(value(model.b()), 1.1 - 0.15, 1e-6);
  });
}

TEST(Gradients, ALayerUnfrozenOnOneRankOnlyIsAnErrorThatNamesIt) {
  std::string text[2];
  on_ranks(2, [&](parallel::ProcessGroup& group) {
    Pair model;
    model.b().set_requires_grad(false);
    parallel::DistributedDataParallel ddp(model, group);
    text[group.rank()] = refusal([&] {
      autograd::backward(ddp(input(1.0)));
      if (group.rank() == 1) model.b().set_requires_grad(true);
      autograd::backward(ddp(input(1.0)));
      group.barrier("the end");
    });
  });
  for (const std::string& said : text) EXPECT_THAT(said, HasSubstr("rank 1"));
}

TEST(Gradients, AFrozenParameterTakesNoGradientMemory) {
  const auto gradient_bytes = [] {
    return core::memory_stats(core::default_device()).of(core::MemoryCategory::gradients);
  };
  const std::size_t before = gradient_bytes();
  nn::Sequential base(nn::Linear(512, 512)), adapter(nn::Linear(8, 8));
  for (NamedTensor& p : base.parameters()) p.tensor.set_requires_grad(false);
  NamedTensors all = base.parameters();
  for (const NamedTensor& p : adapter.parameters()) all.push_back({"adapter." + p.name, p.tensor});
  optim::FusedSGD optimizer(all);
  EXPECT_LT(gradient_bytes() - before, 1024u);
}

TEST(Gradients, TwoLossesOfWhichTheFirstIsNotSynchronisedAreReducedByTheStep) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    amp::Options options = with(kO2, ddp.world());
    options.num_losses = 2;
    amp::Amp precision = amp::initialize(model, optimizer, options);
    for (const bool last : {false, true}) {
      const auto guard = ddp.no_sync(!last);
      precision.backward(ddp(input(own(group))), {.loss_id = 0});
      precision.backward(ddp(input(own(group))), {.loss_id = 1});
    }
    EXPECT_TRUE(precision.step().applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * 4 * 1.5, 1e-6);
  });
}

TEST(Gradients, AStepAfterNoSyncAloneReducesFirst) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    {
      const auto guard = ddp.no_sync();
      autograd::backward(ddp(input(own(group))));
    }
    EXPECT_TRUE(optimizer.step().applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.15, 1e-6);
  });
}

TEST(Gradients, AnErrorInsideBackwardLeavesThemAsTheyWere) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  bool broken = true;
  // The newest operation's backward comes first: b's gradient is written when the one of a throws.
  const auto loss = [&](double x) {
    const Tensor of_a =
        autograd::sum(autograd::mul(autograd::apply(Breaks{&broken}, model.a()), input(x)));
    const Tensor of_b = autograd::sum(autograd::mul(model.b(), input(x)));
    return autograd::add(of_a, of_b);
  };
  EXPECT_THROW(autograd::backward(loss(7.0)), core::OutOfMemory);
  EXPECT_FALSE(model.b().grad().defined());
  EXPECT_EQ(model.b().gradient_slot().memory().to_vector().front(), 7.0);  // written all the same
  broken = false;
  autograd::backward(loss(1.0));  // the smaller batch
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_NEAR(value(model.a()), 1.0, 1e-6);
  EXPECT_NEAR(value(model.b()), 1.0, 1e-6);

  // On top of a gradient that was there nothing can be taken back: the step refuses, and says why.
  autograd::backward(loss(1.0));
  broken = true;
  EXPECT_THROW(autograd::backward(loss(1.0)), core::OutOfMemory);
  EXPECT_THAT(
      refusal([&] { (void)optimizer.step(); }),
      testing::AllOf(HasSubstr("'b'"), HasSubstr("expected memory"), HasSubstr("clear_grad")));
  EXPECT_NEAR(value(model.b()), 1.0, 1e-6);
  optimizer.clear_grad();
  broken = false;
  autograd::backward(loss(1.0));
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_NEAR(value(model.b()), 0.9, 1e-6);
}

TEST(Gradients, ABrokenOneStaysBrokenWhoeverStepsIt) {
  Pair model;
  auto optimizer =
      std::make_unique<optim::FusedSGD>(model.parameters(), optim::SgdOptions{.lr = 0.1});
  bool broken = false;
  const auto loss = [&] { return autograd::apply(Breaks{&broken}, model(input(1.0))); };
  const auto half_way = [&] {
    return autograd::add(
        autograd::sum(autograd::mul(model.b(), input(1.0))),
        autograd::sum(autograd::mul(autograd::apply(Breaks{&broken}, model.a()), input(1.0))));
  };
  autograd::backward(loss());
  optimizer.reset();
  broken = true;
  EXPECT_THROW(autograd::backward(half_way()), core::OutOfMemory);
  broken = false;
  EXPECT_THAT(refusal([&] { autograd::backward(loss()); }), HasSubstr("clear_grad"));
  optim::FusedSGD other(model.parameters(), {.lr = 0.1});
  EXPECT_THAT(refusal([&] { (void)other.step(); }), HasSubstr("clear_grad"));
  other.clear_grad();
  autograd::backward(loss());
  EXPECT_TRUE(other.step().applied);
  EXPECT_NEAR(value(model.a()), 1.0, 1e-6);
}

TEST(Gradients, AnOverflowOfAnyRankSkipsTheStepOfAll) {
  for (const int bad : {0, 1}) {
    on_ranks(2, [bad](parallel::ProcessGroup& group) {
      Pair model;  // whose gradients nobody reduces
      optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
      amp::Amp precision = amp::initialize(model, optimizer, with(kO2, group.world()));
      const double infinite = std::numeric_limits<double>::infinity();
      precision.backward(model(input(group.rank() == bad ? infinite : 1.0)));
      EXPECT_FALSE(precision.step().applied) << "rank " << group.rank();
      EXPECT_EQ(precision.loss_scale(), 512.0);
      EXPECT_NEAR(value(model.a()), 1.1, 1e-6);
    });
  }
}

TEST(Gradients, ASumThatOnlyAnotherRankHasIsOfTheSameLosses) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    amp::Options options = with(kO2, ddp.world());
    options.num_losses = 2;
    amp::Amp precision = amp::initialize(model, optimizer, options);
    const auto of_b = [&] {
      return autograd::sum(autograd::mul(autograd::to(model.b(), DType::f32), input(1.0)));
    };
    {
      const auto guard = ddp.no_sync();
      precision.backward(group.rank() == 0 ? of_b() : ddp(input(1.0)), {.loss_id = 0});
    }
    precision.backward(of_b(), {.loss_id = 1});
    const optim::StepResult result = precision.step();
    EXPECT_TRUE(result.applied) << result.reason;
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * 0.5, 1e-6);
    EXPECT_NEAR(value(model.b()), 1.1 - 0.1 * 2.0, 1e-6);
  });
}

/// Gradients of a plain backward are of the loss that follows it, on all ranks: whatever each
/// rank's reaches.
TEST(Gradients, OfAPlainBackwardBelongToTheNextLossOnAllRanks) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    amp::Options options{.opt_level = amp::OptLevel::O0};  // scales nothing
    options.num_losses = 2;
    options.world = ddp.world();
    amp::Amp precision = amp::initialize(model, optimizer, options);
    autograd::backward(ddp(input(1.0)));
    const Tensor of_b = autograd::sum(autograd::mul(model.b(), input(1.0)));
    precision.backward(group.rank() == 0 ? of_b : ddp(input(3.0)), {.loss_id = 0});
    precision.backward(ddp(input(group.rank() == 0 ? 1.0 : 2.0)), {.loss_id = 1});
    const optim::StepResult result = precision.step();
    EXPECT_TRUE(result.applied) << result.reason;
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * (1.0 + 1.5 + 1.5), 1e-6);
    EXPECT_NEAR(value(model.b()), 1.1 - 0.1 * (1.0 + 2.0 + 1.5), 1e-6);
  });
}

/// A contribution goes on as long as any gradient of it lives, on every rank: of one rank's first
/// micro-batch only a parameter lives that no optimizer steps.
TEST(Gradients, OfALossThatReachesNoSteppedParameterOnOneRankAreOneContribution) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    optim::FusedSGD optimizer({{"a", model.a()}}, {.lr = 0.1});
    amp::Options options{.opt_level = amp::OptLevel::O0};
    options.world = ddp.world();
    amp::Amp precision = amp::initialize(model, optimizer, options);
    const auto loss = [&] {
      const Tensor both = ddp(input(1.0));
      return group.rank() == 0 ? both : autograd::sum(autograd::mul(model.b(), input(1.0)));
    };
    for (int step = 1; step <= 2; ++step) {
      {
        const auto no_sync = ddp.no_sync();
        precision.backward(loss());
      }
      precision.backward(loss());
      const optim::StepResult result = precision.step();
      EXPECT_TRUE(result.applied) << result.reason;
      EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * step, 1e-6);
    }
  });
}

/// Of a window under no_sync one rank has only the gradient of a parameter that was frozen since.
TEST(Gradients, OfAParameterFrozenWithinAWindowAreReducedByTheStepOfAllRanks) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    autograd::backward(ddp(input(1.0)));
    {
      const auto no_sync = ddp.no_sync();
      const Tensor& reached = group.rank() == 0 ? model.b() : model.a();
      autograd::backward(autograd::sum(autograd::mul(reached, input(2.0))));
    }
    model.b().set_requires_grad(false);
    test::expect_applied(optimizer.step({.keep_gradients = true}));
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * (1.0 + 1.0), 1e-6);
    model.b().set_requires_grad(true);
    test::expect_applied(optimizer.step());
    EXPECT_NEAR(value(model.b()), 1.1 - 0.1 * (1.0 + 1.0), 1e-6);
  });
}

TEST(Gradients, OfALossUnderNoSyncThatReachesNothingOnOneRankAreReducedByTheStep) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model, other;
    parallel::DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    autograd::backward(ddp(input(1.0)));
    {
      const auto no_sync = ddp.no_sync();
      autograd::backward(group.rank() == 0 ? other(input(2.0)) : model(input(2.0)));
    }
    test::expect_applied(optimizer.step());
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * (1.0 + 1.0), 1e-6);
  });
}

/// The sum of one rank lacks what another's has of a loss; after the step's reduction none does.
TEST(Gradients, OfALossThatOneRanksSumLacksAreSteppedApart) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    optim::FusedSGD of_a({{"a", model.a()}}, {.lr = 0.1}), of_b({{"b", model.b()}}, {.lr = 0.1});
    amp::Options options{.opt_level = amp::OptLevel::O0, .num_losses = 2};
    options.world = ddp.world();
    amp::Amp precision = amp::initialize(std::vector<nn::Module*>{&model},
                                         std::vector<optim::Optimizer*>{&of_a, &of_b}, options);
    precision.backward(ddp(input(1.0)), {.loss_id = 0});
    {
      const auto no_sync = ddp.no_sync();
      const Tensor of_a_alone = autograd::sum(autograd::mul(model.a(), input(4.0)));
      precision.backward(group.rank() == 0 ? ddp(input(4.0)) : of_a_alone, {.loss_id = 1});
    }
    precision.backward(ddp(input(2.0)), {.loss_id = 0});
    EXPECT_TRUE(precision.step(of_b).applied);
    EXPECT_TRUE(precision.step(of_a).applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * (1.0 + 4.0 + 2.0), 1e-6);
    EXPECT_NEAR(value(model.b()), 1.1 - 0.1 * (1.0 + 2.0 + 2.0), 1e-6);
  });
}

TEST(Gradients, LoadingAStateEndsWhatIsPending) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  amp::Options options = kO2;
  options.num_losses = 2;
  amp::Amp precision = amp::initialize(model, optimizer, options);
  checkpointing::TrainingState state(
      {{"model", model}, {"optimizer", optimizer}, {"amp", precision}});
  const std::string folder = testing::TempDir() + "cairn-orders-pending";
  state.save(folder, 1);
  precision.backward(model(input(4.0)), {.loss_id = 0});
  precision.backward(model(input(std::numeric_limits<float>::infinity())), {.loss_id = 1});
  state.resume_latest(folder);
  EXPECT_FALSE(optim::OptimizerAccess(optimizer).has_gradient());
  precision.backward(model(input(1.0)), {.loss_id = 0});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_NEAR(value(model.a()), 1.0, 1e-6);
}

/// Two micro-batches with gradients of 1 and 3, of a weight of 1.1 at a rate of .1, and something
/// else between them.
void swap_within_a_window(amp::OptLevel level, const std::function<void(Pair&)>& between) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  amp::Options options = kO2;
  options.opt_level = level;
  amp::Amp precision = amp::initialize(model, optimizer, options);
  optim::Accumulation accumulation({.steps = 2});
  for (const double gradient : {1.0, 3.0}) {
    const auto micro = accumulation.begin(4);
    precision.backward(model(input(gradient)), {.weight = micro.weight()});
    if (!micro.last()) between(model);
  }
  EXPECT_TRUE(precision.step({.gradient_scale = accumulation.finish()}).applied);
  EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * 2, 1e-6);
  EXPECT_NEAR(value(model.b()), 1.1 - 0.1 * 2, 1e-6);
}

constexpr amp::OptLevel kLevels[] = {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2};

TEST(Gradients, StayWhereOtherWeightsAreLoadedWithinAWindow) {
  for (const amp::OptLevel level : kLevels) {
    swap_within_a_window(level, [](Pair& model) {
      const StateDict own = test::snapshot(model.state_dict());
      StateDict average;
      average.set("a", Tensor::full({4}, 2.0));
      average.set("b", Tensor::full({4}, 3.0));
      model.load_state_dict(average);
      EXPECT_NEAR(model(input(1.0)).item(), 20.0, 1e-2);
      model.load_state_dict(own);
    });
  }
}

TEST(Gradients, StayWhereWeightsPointElsewhereWithinAWindow) {
  for (const amp::OptLevel level : kLevels) {
    swap_within_a_window(level, [](Pair& model) {
      for (const NamedTensor& parameter : model.parameters()) {
        Tensor weight = parameter.tensor;
        const Tensor own = weight.detach();
        weight.set_data(Tensor::full({4}, 2.0, weight.dtype()));
        weight.set_data(own);
      }
    });
  }
}

TEST(Gradients, StayWhereAveragesAreInUseWithinAWindow) {
  for (const amp::OptLevel level : kLevels) {
    swap_within_a_window(level, [](Pair& model) {
      optim::WeightAverage average(model.parameters());
      kernels::fill(average.averages()[0].tensor, 2.0);
      const auto in_use = average.use();
      EXPECT_EQ(value(model.a()), 2.0);
    });
  }
}

TEST(Gradients, OfAWeightThatIsCastAreGone) {
  Pair model;
  autograd::backward(model(input(1.0)));
  model.a().set_data(Tensor::full({4}, 1.0, DType::f16));
  EXPECT_FALSE(model.a().grad().defined());
  EXPECT_TRUE(model.b().grad().defined());
}

TEST(Gradients, TheModuleInPlaceOfDdpAfterAFailedBackwardStillReduces) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    bool broken = true;
    EXPECT_THROW(autograd::backward(autograd::apply(Breaks{&broken}, ddp(input(1.0)))),
                 core::OutOfMemory);
    model.clear_grad();
    autograd::backward(model(input(own(group))));
    EXPECT_TRUE(optimizer.step().applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.15, 1e-6);
  });
}

TEST(Gradients, OneParameterOfTwoOptimizersIsRefused) {
  Pair model;
  optim::FusedSGD first(model.parameters(), {.lr = 0.1}), second(model.parameters(), {.lr = 0.1});
  autograd::backward(model(input(1.0)));
  EXPECT_TRUE(first.step().applied);
  EXPECT_THAT(refusal([&] { (void)second.step(); }), HasSubstr("another optimizer steps too"));
  EXPECT_THAT(refusal([&] {
                (void)amp::initialize({&model}, {&first, &second}, kO2);
              }),
              HasSubstr("'a'"));
  {
    optim::FusedSGD owner(model.parameters(), {.lr = 0.1});
    EXPECT_THROW((void)owner.step(), core::InvalidArgument);
  }
}

TEST(Gradients, AnotherOptimizerMayTakeOverFromOneThatHasEnded) {
  Pair model;
  auto optimizer =
      std::make_unique<optim::FusedSGD>(model.parameters(), optim::SgdOptions{.lr = 0.1});
  for (int k = 0; k < 2; ++k) {
    autograd::backward(model(input(1.0)));
    EXPECT_TRUE(optimizer->step().applied);
    optimizer = std::make_unique<optim::FusedSGD>(model.parameters(), optim::SgdOptions{.lr = 0.1});
  }
  EXPECT_NEAR(value(model.a()), 0.9, 1e-6);
}

TEST(Gradients, WhoScaledThemMustStepThem) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  amp::Amp precision = amp::initialize(model, optimizer, kO2);
  precision.backward(model(input(1.0)));
  EXPECT_THAT(refusal([&] { (void)optimizer.step(); }), HasSubstr("precision.step()"));
  EXPECT_NEAR(precision.unscaled_gradient(model.a()).to_vector().front(), 1.0, 1e-6);
  EXPECT_TRUE(precision.step().applied);
  EXPECT_NEAR(value(model.a()), 1.0, 1e-6);

  autograd::backward(model(input(1.0)));
  EXPECT_THAT(refusal([&] { (void)precision.step(); }), HasSubstr("precision.backward"));
  EXPECT_NEAR(value(model.a()), 1.0, 1e-6);
  optimizer.clear_grad();

  autograd::backward(autograd::affine(model(input(1.0)), precision.loss_scale(), 0.0));
  precision.adopt_gradients(optimizer);
  EXPECT_TRUE(precision.step().applied);
  EXPECT_NEAR(value(model.a()), 0.9, 1e-6);
}

TEST(Gradients, SumsOfManyMicroBatchesLoseNothing) {
  constexpr int kMicroBatches = 4096;
  for (const DType half : {DType::f16, DType::bf16}) {
    Pair model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    amp::Amp precision = amp::initialize(
        model, optimizer, {.opt_level = amp::OptLevel::O2, .half_dtype = half, .loss_scale = 1.0});
    for (int k = 0; k < kMicroBatches; ++k) precision.backward(model(input(0.0625)));
    const double sum = precision.unscaled_gradient(model.a()).to_vector().front();
    EXPECT_NEAR(sum, kMicroBatches * 0.0625, 1e-3);
    optimizer.clear_grad();
  }
}

TEST(Gradients, ASingleMicroBatchKeepsHalfSlots) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  amp::Amp precision = amp::initialize(model, optimizer, kO2);
  for (int step = 0; step < 3; ++step) {
    precision.backward(model(input(1.0)));
    EXPECT_EQ(model.a().grad().dtype(), DType::f16);
    test::expect_applied(precision.step());
  }
  precision.backward(model(input(1.0)));
  precision.backward(model(input(1.0)));
  EXPECT_EQ(model.a().grad().dtype(), DType::f32);
}

TEST(Gradients, AResumedRunSumsLikeTheUnbrokenOne) {
  const auto train = [](Pair& model, optim::Optimizer& optimizer, amp::Amp& precision, int steps) {
    for (int step = 0; step < steps; ++step) {
      for (const double x : {0.3, 1e-4, 0.7}) precision.backward(model(input(x)));
      EXPECT_TRUE(precision.step().applied);
    }
    return std::pair(value(model.a()), optimizer.steps());
  };
  const amp::Options options{
      .opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .loss_scale = 1.0};
  Pair model, other;
  optim::FusedAdam optimizer(model.parameters()), others(other.parameters());
  amp::Amp precision = amp::initialize(model, optimizer, options);
  amp::Amp other_precision = amp::initialize(other, others, options);
  train(model, optimizer, precision, 2);
  other.load_state_dict(model.state_dict());
  others.load_state_dict(optimizer.state_dict());
  EXPECT_EQ(train(model, optimizer, precision, 3), train(other, others, other_precision, 3));
}

TEST(Gradients, AStepWithoutAnyIsNotApplied) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  optim::Schedule schedule(optimizer, optim::step_decay(1, 0.5));
  amp::Options options = kO2;
  options.scaler.growth_interval = 1;
  amp::Amp precision = amp::initialize(model, optimizer, options);
  const optim::StepResult result = precision.step();
  schedule.step(result);
  EXPECT_FALSE(result.applied);
  EXPECT_THAT(result.reason, HasSubstr("no parameter has a gradient"));
  EXPECT_EQ(optimizer.steps(), 0);
  EXPECT_EQ(optimizer.lr(), 0.1);
  EXPECT_EQ(precision.loss_scale(), 1024.0);
  EXPECT_FALSE(optimizer.step().applied);
}

TEST(Gradients, TheRanksThatReduceMustBeKnownToAmp) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    amp::Amp precision = amp::initialize(model, optimizer, kO2);  // forgets .world
    precision.backward(ddp(input(1.0)));
    EXPECT_THAT(refusal([&] { (void)precision.step(); }), HasSubstr("ddp.world()"));
  });
}

TEST(Gradients, DdpReducesOnlyItsOwnModels) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Pair model, other;
    NamedTensors all = model.parameters();
    for (const NamedTensor& p : other.parameters()) all.push_back({"other." + p.name, p.tensor});
    optim::FusedSGD optimizer(all, {.lr = 0.1});
    parallel::DistributedDataParallel ddp(model, group);
    std::size_t parameters = 0;
    for (const auto& bucket : ddp.buckets()) parameters += bucket.parameters.size();
    EXPECT_EQ(parameters, 2u);
    autograd::backward(autograd::add(ddp(input(own(group))), other(input(own(group)))));
    EXPECT_TRUE(optimizer.step().applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.15, 1e-6);
    EXPECT_NEAR(value(other.a()), 1.1 - 0.1 * own(group), 1e-6);
  });
}

TEST(Gradients, OneLossOfTwoOptimizersThatStepAtDifferentRates) {
  Pair model;
  optim::FusedSGD a({{"a", model.a()}}, {.lr = 0.1}), b({{"b", model.b()}}, {.lr = 0.1});
  amp::Amp precision = amp::initialize({&model}, {&a, &b}, kO2);
  for (int k = 0; k < 3; ++k) {
    precision.backward(model(input(1.0)));
    EXPECT_TRUE(precision.step(a).applied);
  }
  EXPECT_TRUE(precision.step(b).applied);
  EXPECT_NEAR(value(model.a()), 0.8, 1e-6);
  EXPECT_NEAR(value(model.b()), 0.8, 1e-6);
}

}  // namespace
}  // namespace cairn::orders
