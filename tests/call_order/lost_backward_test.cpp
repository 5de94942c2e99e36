// Ranks that contribute other losses to a step: all of them throw, and clear_grad() on all begins
// anew.
#include <chrono>
#include <limits>

#include "cairn/amp/scaled_step.h"
#include "support.h"

namespace cairn::orders {
namespace {

using testing::HasSubstr;

/// A rank of two whose weights have an optimizer each, in one handle; the second rank may lose its
/// backwards.
struct Trainer {
  Trainer(const parallel::ProcessGroup& g, const parallel::DistributedOptions& how)
      : group(g),
        ddp(model, group, how),
        of_a({{"a", model.a()}}, {.lr = 0.1}),
        of_b({{"b", model.b()}}, {.lr = 0.1}),
        precision(amp::initialize(std::vector<nn::Module*>{&model},
                                  std::vector<optim::Optimizer*>{&of_a, &of_b}, options())) {}

  amp::Options options() const {
    amp::Options o{.opt_level = amp::OptLevel::O2,
                   .half_dtype = DType::f16,
                   .scaler = {.init_scale = 16, .growth_interval = 2},
                   .num_losses = 2};
    o.dynamic_loss_scale = true;
    o.world = ddp.world();
    return o;
  }
  bool loses() const { return group.rank() == 1; }
  void backward(double gradient, int id = 0) {
    precision.backward(ddp(input(gradient)), {.loss_id = id});
  }
  /// Its first operation's backward throws, ahead of all gradients.
  void broken_backward() { precision.backward(autograd::apply(Breaks{&broken}, ddp(input(1.0)))); }
  void backward_of_first(double gradient) {
    const auto guard = ddp.no_sync();
    if (!loses()) return backward(gradient);
    EXPECT_THROW(broken_backward(), core::OutOfMemory);
  }
  void expect_weights(double a, double b) {
    EXPECT_NEAR(value(model.a()), a, 1e-5);
    EXPECT_NEAR(value(model.b()), b, 1e-5);
  }
  void expect_goes_on() {
    model.clear_grad();
    const double a = value(model.a()), b = value(model.b());
    backward(1.0);
    EXPECT_TRUE(precision.step(of_b).applied);
    EXPECT_TRUE(precision.step(of_a).applied);
    expect_weights(a - 0.1, b - 0.1);
    group.barrier("the end");
  }

  parallel::ProcessGroup group;
  Pair model;
  parallel::DistributedDataParallel ddp;
  optim::FusedSGD of_a, of_b;
  amp::Amp precision;
  const bool broken = true;
};

const parallel::DistributedOptions kPlain, kFindsUnused{.find_unused_parameters = true},
    kStaticGraph{.static_graph = true};

/// Nobody waits for a timeout.
void on_two(const std::function<void(Trainer&)>& body,
            const parallel::DistributedOptions& how = kFindsUnused) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(2, [&](parallel::ProcessGroup& group) {
    Trainer t(group, how);
    body(t);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
}

TEST(LostBackward, UnderNoSyncTheStepIsAnErrorOnAll) {
  for (const auto& how : {kPlain, kFindsUnused}) {
    on_two(
        [](Trainer& t) {
          t.backward_of_first(1.0);
          for (optim::Optimizer* optimizer : {&t.of_a, &t.of_b}) {
            EXPECT_THAT(refusal([&] { (void)t.precision.step(*optimizer); }),
                        testing::AllOf(HasSubstr(t.loses() ? "whole gradient" : "on rank 1"),
                                       HasSubstr("clear_grad()")));
          }
          t.expect_weights(1.1, 1.1);
          t.expect_goes_on();
        },
        how);
  }
}

TEST(LostBackward, AfterAnotherLossTheStepIsAnErrorOnAll) {
  on_two([](Trainer& t) {
    {
      const auto guard = t.ddp.no_sync();
      t.backward(1.0, 1);
    }
    t.backward_of_first(1.0);
    EXPECT_THAT(refusal([&] { (void)t.precision.step(); }),
                HasSubstr(t.loses() ? "whole gradient" : "on rank 1"));
    t.expect_goes_on();
  });
}

/// The group breaks: the others are in a collective that this rank does not come to.
TEST(LostBackward, ABackwardThatReducesEndsOnAllWithTheReason) {
  for (const auto& how : {kPlain, kFindsUnused}) {
    on_two(
        [](Trainer& t) {
          EXPECT_THAT(refusal([&] { t.loses() ? t.broken_backward() : t.backward(1.0); }),
                      HasSubstr("expected memory"));
        },
        how);
  }
}

/// Where all ranks lose it, none waits for another, and the group lives.
TEST(LostBackward, OnAllRanksIsAnErrorUntilGradientsAreCleared) {
  on_two([](Trainer& t) {
    EXPECT_THROW(t.broken_backward(), core::OutOfMemory);
    EXPECT_THAT(refusal([&] { t.backward(1.0); }), HasSubstr("clear_grad()"));
    t.expect_goes_on();
  });
}

TEST(LostBackward, AGradientThatAmpScaledOnOneRankOnlyIsAnErrorOnAll) {
  on_two([](Trainer& t) {
    {
      const auto guard = t.ddp.no_sync();
      t.loses() ? autograd::backward(t.ddp(input(1.0))) : t.backward(1.0);
    }
    EXPECT_THAT(refusal([&] { (void)t.precision.step(); }),
                testing::AllOf(HasSubstr("scaled by 16 on rank 0"),
                               HasSubstr("that nobody scaled on rank 1")));
    t.expect_goes_on();
  });
}

/// Who lost a loss in forward comes to the step without it.
TEST(LostBackward, ALossThatOneRankLeftOutEndsOnAll) {
  on_two([](Trainer& t) {
    {
      const auto guard = t.ddp.no_sync();
      if (!t.loses()) t.backward(1.0);
    }
    EXPECT_THAT(refusal([&] { (void)t.precision.step(); }),
                HasSubstr("the same losses on every rank since the last step"));
  });
}

TEST(LostBackward, AnotherLossOnOneRankIsAnErrorThatNamesBoth) {
  for (const auto& how : {kPlain, kFindsUnused, kStaticGraph}) {
    on_two(
        [](Trainer& t) {
          const auto backward_and_step = [&] {
            t.backward(1.0, t.loses() ? 1 : 0);
            (void)t.precision.step();
          };
          EXPECT_THAT(refusal(backward_and_step), testing::AllOf(HasSubstr("loss 0 scaled by 16"),
                                                                 HasSubstr("loss 1 scaled by 16")));
          t.expect_weights(1.1, 1.1);
        },
        how);
  }
}

/// Loss 0 is scaled by 16 and loss 1 by 8, because it has overflowed once.
void scale_apart(Trainer& t) {
  t.backward(std::numeric_limits<double>::infinity(), 1);
  EXPECT_FALSE(t.precision.step().applied);
}

void under_no_sync(Trainer& t, double gradient, int id) {
  const auto guard = t.ddp.no_sync();
  t.backward(gradient, id);
}

/// Buckets would mix two scales: the ranks hear of it where they tell what their losses reach.
TEST(LostBackward, LossesInAnotherOrderAreAnErrorOfTheBackwardThatReduces) {
  on_two([](Trainer& t) {
    scale_apart(t);
    if (!t.loses()) under_no_sync(t, 1.0, 0);
    EXPECT_THAT(
        refusal([&] { t.backward(1.0, t.loses() ? 0 : 1); }),
        testing::AllOf(HasSubstr("loss 1 scaled by 8, sums of loss 0 scaled by 16 on rank 0"),
                       HasSubstr("and loss 0 scaled by 16 on rank 1")));
    EXPECT_THAT(refusal([&] { (void)t.precision.step(); }), HasSubstr("clear_grad()"));
    t.expect_weights(1.1, 1.1);
    t.expect_goes_on();
  });
}

/// Where nothing is told, the names of the buckets differ.
TEST(LostBackward, LossesThatAllReduceInAnotherOrderAreAnErrorOfTheBackward) {
  for (const auto& how : {kPlain, kFindsUnused, kStaticGraph}) {
    on_two(
        [](Trainer& t) {
          scale_apart(t);
          t.backward(1.0, 0);
          const auto others_and_step = [&] {
            t.backward(1.0, t.loses() ? 0 : 1);
            t.backward(1.0, t.loses() ? 1 : 0);
            (void)t.precision.step();
          };
          EXPECT_THAT(refusal(others_and_step), testing::AllOf(HasSubstr("loss 0 scaled by 16"),
                                                               HasSubstr("loss 1 scaled by 8")));
          t.expect_weights(1.1, 1.1);
        },
        how);
  }
}

TEST(LostBackward, LossesThatAllReduceInOneOrderGoOn) {
  for (const auto& how : {kPlain, kFindsUnused, kStaticGraph}) {
    on_two(
        [](Trainer& t) {
          scale_apart(t);
          t.backward(1.0, 0);
          t.backward(2.0, 1);
          t.backward(3.0, 0);
          EXPECT_TRUE(t.precision.step().applied);
          t.expect_weights(0.5, 0.5);
          t.expect_goes_on();
        },
        how);
  }
}

/// Also what waits beside a loss that is the same on all: one arena has turned to f32, and the
/// other has not.
TEST(LostBackward, LossesUnderNoSyncInAnotherOrderAreAnErrorOfTheBackwardThatReduces) {
  for (const auto& how : {kPlain, kFindsUnused, kStaticGraph}) {
    on_two(
        [](Trainer& t) {
          scale_apart(t);
          under_no_sync(t, 1.0, t.loses() ? 1 : 0);
          under_no_sync(t, 1.0, t.loses() ? 0 : 1);
          EXPECT_THAT(refusal([&] { t.backward(1.0, 0); }),
                      testing::AllOf(HasSubstr("loss 0 scaled by 16, sums of loss 1 scaled by 8"),
                                     HasSubstr("loss 0 scaled by 16, sums of loss 0 scaled by 16 "
                                               "and loss 1 scaled by 8")));
          t.expect_weights(1.1, 1.1);
        },
        how);
  }
}

/// Where no backward reduces, the step compares.
TEST(LostBackward, LossesInAnotherOrderAreAnErrorOfTheStep) {
  for (const auto& how : {kPlain, kStaticGraph}) {
    on_two(
        [](Trainer& t) {
          t.backward(1.0);  // static_graph: ranks tell what it reaches, once
          EXPECT_TRUE(t.precision.step().applied);
          scale_apart(t);
          under_no_sync(t, 1.0, t.loses() ? 1 : 0);
          under_no_sync(t, 1.0, t.loses() ? 0 : 1);
          for (int again = 0; again < 2; ++again) {
            EXPECT_THAT(
                refusal([&] { (void)t.precision.step(); }),
                testing::AllOf(
                    HasSubstr("loss 1 scaled by 8, sums of loss 0 scaled by 16 on rank 0"),
                    HasSubstr("loss 0 scaled by 16, sums of loss 1 scaled by 8 on rank 1")));
          }
          t.expect_weights(1.0, 1.0);
          t.expect_goes_on();
        },
        how);
  }
}

/// Of a loss under no_sync that reaches other parameters on the other rank, then a plain one.
TEST(LostBackward, ALossThatReachesOtherParametersElsewhereIsTheSameLoss) {
  for (const bool first : {false, true}) {
    on_ranks(2, [&](parallel::ProcessGroup& group) {
      Pair model;
      parallel::DistributedDataParallel ddp(model, group, kFindsUnused);
      optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
      amp::Amp precision =
          amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O0, .world = ddp.world()});
      {
        const auto guard = ddp.no_sync();
        const Tensor one = autograd::sum(autograd::mul(first ? model.a() : model.b(), input(1.0)));
        precision.backward(group.rank() == 0 ? ddp(input(1.0)) : one);
      }
      autograd::backward(ddp(input(1.0)));
      EXPECT_TRUE(precision.step().applied);
      EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * (first ? 2.0 : 1.5), 1e-6);
      EXPECT_NEAR(value(model.b()), 1.1 - 0.1 * (first ? 1.5 : 2.0), 1e-6);
    });
  }
}

/// One rank has something else to reduce than the other: they meet in different exchanges, which
/// breaks the group.
TEST(LostBackward, ALossUnderNoSyncOnOneRankEndsOnAllWithCommunicationErrors) {
  for (const auto& how : {kPlain, kStaticGraph}) {
    for (const bool ahead : {false, true}) {
      on_two(
          [&](Trainer& t) {
            t.backward(1.0, 1);  // static_graph: ranks tell what it reaches, once
            EXPECT_TRUE(t.precision.step().applied);
            const auto window = [&] {
              if (ahead && !t.loses()) under_no_sync(t, 1.0, 0);
              t.backward(1.0, 1);
              if (!ahead && !t.loses()) under_no_sync(t, 1.0, 0);
              (void)t.precision.step();
            };
            EXPECT_THROW(window(), core::CommunicationError);
            t.expect_weights(1.0, 1.0);
          },
          how);
    }
  }
}

/// Of the loss one rank has a gradient left and the other none.
TEST(LostBackward, AStepThatAllRefusedIsRefusedByAllAgain) {
  on_two([](Trainer& t) {
    {
      const auto guard = t.ddp.no_sync();
      const Tensor of_b = autograd::sum(autograd::mul(t.model.b(), input(1.0)));
      t.precision.backward(t.loses() ? of_b : t.ddp(input(1.0)));
    }
    t.of_b.clear_grad();
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(refusal([&] { (void)t.precision.step(); }), HasSubstr("loss 0"));
    }
    t.expect_goes_on();
  });
}

TEST(LostBackward, ARefusalOfOneRanksStepIsAnErrorOnAll) {
  on_two([](Trainer& t) {
    const auto guard = t.ddp.no_sync();
    t.precision.backward(t.ddp(input(1.0)), {.delay_unscale = t.loses()});
    EXPECT_THAT(refusal([&] { (void)t.precision.step(t.of_a); }), HasSubstr("delay_unscale"));
  });
}

TEST(LostBackward, ARefusalOfOneRanksScaledStepIsAnErrorOnAll) {
  on_two([](Trainer& t) {
    Pair model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    amp::ScaledStep scaled(optimizer, {.init_scale = 16}, t.group.world());
    const auto backward = [&] {
      autograd::backward(autograd::affine(model(input(1.0)), scaled.scale(), 0.0));
    };
    backward();
    if (t.loses()) model.a().gradient_slot().mark_broken("a backward failed");
    EXPECT_THAT(refusal([&] { (void)scaled.step(); }),
                testing::AllOf(HasSubstr(t.loses() ? "[gradient]" : "got on rank 1: [gradient]"),
                               HasSubstr("a backward failed"), HasSubstr("clear_grad()")));
    EXPECT_NEAR(value(model.a()), 1.1, 1e-6);
    model.clear_grad();
    backward();
    EXPECT_TRUE(scaled.step().applied);
    EXPECT_NEAR(value(model.a()), 1.0, 1e-6);
  });
}

/// Of a loss that both optimizers are given.
TEST(LostBackward, AnOverflowOnOneRankSkipsBothOptimizersOnAll) {
  on_two([](Trainer& t) {
    t.backward(t.loses() ? std::numeric_limits<double>::infinity() : 1.0);
    const double before = t.precision.loss_scale();
    EXPECT_FALSE(t.precision.step(t.of_a).applied);
    EXPECT_FALSE(t.precision.step(t.of_b).applied);
    t.expect_weights(1.1, 1.1);
    EXPECT_LT(t.precision.loss_scale(), before);
    t.expect_goes_on();
  });
}

/// With sums instead of averages a second backward after the one that reduced would count ranks
/// twice.
TEST(LostBackward, WithSumsNothingMayFollowTheBackwardThatReduced) {
  on_two([](Trainer& t) {
    Pair model;
    parallel::DistributedDataParallel ddp(model, t.group, {.average = false});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    {
      const auto guard = ddp.no_sync();
      autograd::backward(ddp(input(1.0)));
    }
    autograd::backward(ddp(input(1.0)));
    EXPECT_TRUE(optimizer.step().applied);
    EXPECT_NEAR(value(model.a()), 1.1 - 0.1 * 4, 1e-5);
    autograd::backward(ddp(input(1.0)));
    EXPECT_THAT(refusal([&] { autograd::backward(ddp(input(1.0))); }),
                testing::AllOf(HasSubstr("average = false"), HasSubstr("no_sync")));
  });
}

}  // namespace
}  // namespace cairn::orders
