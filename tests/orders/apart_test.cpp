// What only some ranks of a data-parallel job have, since a backward threw on the others: what all share stays the same.
#include <chrono>
#include <limits>

#include "support.h"

namespace cairn::orders {
namespace {

using testing::HasSubstr;

/// A rank of two that trains a Pair of O2 whose second rank may lose its backwards.
struct Trainer {
  explicit Trainer(const parallel::ProcessGroup& g, DType half = DType::f16)
      : group(g),
        ddp(model, group, {.find_unused_parameters = true}),
        optimizer(model.parameters(), {.lr = 0.1}),
        precision(amp::initialize(model, optimizer, options(half))) {}

  amp::Options options(DType half) const {
    amp::Options o{.opt_level = amp::OptLevel::O2,
                   .half_dtype = half,
                   .scaler = {.init_scale = 16, .growth_interval = 2}};
    o.dynamic_loss_scale = true;
    o.world = ddp.world();
    return o;
  }
  Tensor loss(double gradient) { return ddp(input(gradient)); }
  /// Its first operation's backward throws, ahead of all gradients.
  Tensor broken_loss() { return autograd::apply(Breaks{&broken}, loss(1.0)); }
  template <class Backward>
  void lose(Backward backward) {
    EXPECT_THROW(backward(broken_loss()), core::OutOfMemory);
  }
  void by_amp(const Tensor& loss) { precision.backward(loss); }
  bool loses() const { return group.rank() == 1; }
  /// All is as if nothing had been lost.
  void expect_goes_on() {
    model.clear_grad();
    const double before = value(model.a());
    by_amp(loss(1.0));
    EXPECT_TRUE(precision.step().applied);
    EXPECT_NEAR(value(model.a()), before - 0.1, 1e-5);
    group.barrier("the end");
  }

  parallel::ProcessGroup group;
  Pair model;
  parallel::DistributedDataParallel ddp;
  optim::FusedSGD optimizer;
  amp::Amp precision;
  const bool broken = true;
};

/// One rank has a gradient that nobody scaled, and the other's last loss was amp's.
TEST(Apart, RanksRefuseAStepTogetherWhicheverLossTheirsWas) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Trainer t(group);
    t.by_amp(t.loss(1.0));
    EXPECT_TRUE(t.precision.step().applied);
    {
      const auto guard = t.ddp.no_sync();
      const auto plain = [](const Tensor& loss) { autograd::backward(loss); };
      t.loses() ? t.lose(plain) : plain(t.loss(1.0));
    }
    EXPECT_THAT(refusal([&] { t.precision.step(); }), HasSubstr("plain backward"));
    t.expect_goes_on();
  });
}

/// The other way round: the lost gradient counts as a zero of amp's.
TEST(Apart, AZeroInPlaceOfALostGradientHasTheScaleOfTheOthers) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Trainer t(group);
    autograd::backward(t.loss(1.0));
    t.model.clear_grad();
    {
      const auto guard = t.ddp.no_sync();
      const auto by_amp = [&](const Tensor& loss) { t.by_amp(loss); };
      t.loses() ? t.lose(by_amp) : by_amp(t.loss(1.0));
    }
    EXPECT_TRUE(t.precision.step().applied);
    EXPECT_NEAR(value(t.model.a()), 1.1 - 0.05, 1e-5);
    t.expect_goes_on();
  });
}

/// One rank has thrown before its backward began.
TEST(Apart, ARankWithoutALossUnscalesAndCountsLikeTheOthers) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Trainer t(group);
    for (int step = 1; step <= 2; ++step) {
      {
        const auto guard = t.ddp.no_sync();
        if (!t.loses()) t.by_amp(t.loss(1.0));
      }
      EXPECT_TRUE(t.precision.step().applied);
      EXPECT_NEAR(value(t.model.a()), 1.1 - 0.05 * step, 1e-5);
    }
    EXPECT_EQ(t.precision.loss_scale(), 32.0);
    t.expect_goes_on();
  });
}

TEST(Apart, AGradientThatAmpScaledOnOneRankOnlyIsAnErrorOnAll) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Trainer t(group);
    {
      const auto guard = t.ddp.no_sync();
      group.rank() == 0 ? t.by_amp(t.loss(1.0)) : autograd::backward(t.loss(1.0));
    }
    EXPECT_THAT(refusal([&] { t.precision.step(); }),
                HasSubstr("'a' that amp scaled on every rank or on none, got one on rank 0"));
    t.expect_goes_on();
  });
}

/// Nobody waits for its timeout, and the group lives.
void expect_together(const std::function<void(Trainer&)>& backward, DType half = DType::f16) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(2, [&](parallel::ProcessGroup& group) {
    Trainer t(group, half);
    backward(t);
    t.expect_goes_on();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
}

TEST(Apart, ABackwardThatAmpRefusesOnOneRankEndsOnAll) {
  expect_together([](Trainer& t) {
    {
      const auto guard = t.ddp.no_sync();
      const auto plain = [](const Tensor& loss) { autograd::backward(loss); };
      t.loses() ? t.lose(plain) : plain(t.loss(1.0));
    }
    EXPECT_THAT(refusal([&] { t.by_amp(t.loss(1.0)); }), HasSubstr("plain backward"));
  });
}

TEST(Apart, ABackwardThatBreaksOffOnOneRankBeforeItReducesEndsOnAll) {
  expect_together([](Trainer& t) {
    for (int round = 0; round < 2; ++round) {
      const auto backward = [&] { t.by_amp(t.loses() ? t.broken_loss() : t.loss(1.0)); };
      EXPECT_THAT(refusal(backward), HasSubstr("expected memory"));
    }
  });
}

/// The rank that still has a gradient adds to it, for which its slots turn to f32.
TEST(Apart, RanksWhoseGradientsLieInOtherDtypesReduceThem) {
  for (const bool reduces : {false, true}) {
    for (const DType half : {DType::f16, DType::bf16}) {
      const auto lose_one = [&](Trainer& t) {
        const auto by_amp = [&](const Tensor& loss) { t.by_amp(loss); };
        {
          const auto guard = t.ddp.no_sync();
          t.loses() ? t.lose(by_amp) : by_amp(t.loss(1.0));
        }
        {
          const auto guard = t.ddp.no_sync(!reduces);
          by_amp(t.loss(t.group.rank() + 1.0));
        }
        EXPECT_TRUE(optim::GradientArena::of(t.model.a())->f32_slots() || t.loses());
        const Tensor forward = t.loss(1.0);
        EXPECT_TRUE(t.precision.step().applied);
        EXPECT_NEAR(value(t.model.a()), 1.1 - 0.1 * (1 + 1 + 2) / 2, 1e-5);
        EXPECT_NEAR(value(t.model.b()), 1.1 - 0.1 * (1 + 1 + 2) / 2, 1e-5);
        EXPECT_TRUE(optim::GradientArena::of(t.model.a())->f32_slots());
      };
      expect_together(lose_one, half);
    }
  }
}

/// A rank of two whose weights have an optimizer each, in one handle; the second rank may lose its backwards.
struct ApartTrainer {
  ApartTrainer(const parallel::ProcessGroup& g, amp::OptLevel level, bool in_forward,
               bool finds_unused)
      : loses_in_forward(in_forward),
        group(g),
        ddp(model, group, {.find_unused_parameters = finds_unused}),
        of_a({{"a", model.a()}}, {.lr = 0.1}),
        of_b({{"b", model.b()}}, {.lr = 0.1}),
        precision(amp::initialize(std::vector<nn::Module*>{&model},
                                  std::vector<optim::Optimizer*>{&of_a, &of_b}, options(level))) {}

  amp::Options options(amp::OptLevel level) const {
    amp::Options o{.opt_level = level,
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
  void lose(int id = 0) {
    if (loses_in_forward) return;
    const Tensor loss = autograd::apply(Breaks{&broken}, ddp(input(1.0)));
    EXPECT_THROW(precision.backward(loss, {.loss_id = id}), core::OutOfMemory);
  }
  /// Without a reduction, where the second rank loses its own.
  void backward_of_first(double gradient, int id = 0) {
    const auto guard = ddp.no_sync();
    loses() ? lose(id) : backward(gradient, id);
  }
  void backward_of_second(double gradient, int id = 0) {
    const auto guard = ddp.no_sync();
    loses() ? backward(gradient, id) : lose(id);
  }
  void backward_alone(double gradient) {
    const auto guard = ddp.no_sync();
    backward(gradient);
  }
  void step(optim::Optimizer& optimizer) { EXPECT_TRUE(precision.step(optimizer).applied); }
  void expect_weights(double a, double b) {
    EXPECT_NEAR(value(model.a()), a, 1e-5);
    EXPECT_NEAR(value(model.b()), b, 1e-5);
  }
  void expect_goes_on() {
    model.clear_grad();
    const double a = value(model.a()), b = value(model.b());
    backward(1.0);
    step(of_b);
    step(of_a);
    expect_weights(a - 0.1, b - 0.1);
    group.barrier("the end");
  }

  const bool loses_in_forward;
  parallel::ProcessGroup group;
  Pair model;
  parallel::DistributedDataParallel ddp;
  optim::FusedSGD of_a, of_b;
  amp::Amp precision;
  const bool broken = true;
};

void expect_apart(const std::function<void(ApartTrainer&)>& train, bool finds_unused = true) {
  for (const amp::OptLevel level : {amp::OptLevel::O1, amp::OptLevel::O2}) {
    for (const bool in_forward : {false, true}) {
      SCOPED_TRACE(core::str(amp::name(level), in_forward ? ", lost in forward" : ""));
      const auto begin = std::chrono::steady_clock::now();
      on_ranks(2, [&](parallel::ProcessGroup& group) {
        ApartTrainer t(group, level, in_forward, finds_unused);
        train(t);
        t.expect_goes_on();
      });
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
    }
  }
}

TEST(Apart, OptimizersOfOneLossStepApartWhereARankLacksIt) {
  expect_apart([](ApartTrainer& t) {
    t.backward_of_first(1.0);
    t.step(t.of_a);
    t.expect_weights(1.05, 1.1);
    t.step(t.of_b);
    t.expect_weights(1.05, 1.05);
  });
}

TEST(Apart, ALossBetweenTheStepsAddsToWhatIsLeft) {
  expect_apart([](ApartTrainer& t) {
    t.backward_of_first(1.0);
    t.step(t.of_a);
    t.backward_alone(1.0);
    t.step(t.of_b);
    t.expect_weights(1.05, 1.1 - 0.1 * (0.5 + 1.0));
    t.step(t.of_a);
    t.expect_weights(1.05 - 0.1, 0.95);
  });
}

TEST(Apart, AReducingBackwardBetweenTheStepsAddsToWhatIsLeft) {
  expect_apart([](ApartTrainer& t) {
    t.backward_of_first(1.0);
    t.step(t.of_b);
    t.backward(1.0);
    t.step(t.of_a);
    t.expect_weights(1.1 - 0.15, 1.05);
    t.step(t.of_b);
    t.expect_weights(0.95, 0.95);
  });
}

/// Each rank has a loss that the other lacks, of another scale.
TEST(Apart, LossesOfOtherScalesThatOneRankHasEach) {
  for (const bool first_reduces : {false, true}) {
    expect_apart([&](ApartTrainer& t) {
      for (int k = 0; k < 2; ++k) {
        t.backward(0.0);
        t.step(t.of_a);
        t.step(t.of_b);
      }
      EXPECT_NE(t.precision.loss_scale(0), t.precision.loss_scale(1));
      if (first_reduces) t.backward(1.0, 1);
      t.backward_of_first(1.0, 0);
      t.backward_of_second(3.0, 1);
      const double mean = 0.5 + 1.5 + (first_reduces ? 1.0 : 0.0);
      t.step(t.of_a);
      t.expect_weights(1.1 - 0.1 * mean, 1.1);
      t.step(t.of_b);
      t.expect_weights(1.1 - 0.1 * mean, 1.1 - 0.1 * mean);
    });
  }
}

/// Only the first rank knows that the loss of this step reaches the other optimizer too.
TEST(Apart, AnOverflowOnOneRankSkipsBothOptimizers) {
  expect_apart([](ApartTrainer& t) {
    t.backward_of_first(std::numeric_limits<double>::infinity());
    const double before = t.precision.loss_scale();
    const optim::StepResult first = t.precision.step(t.of_a);
    EXPECT_FALSE(first.applied);
    EXPECT_THAT(first.culprit, testing::AnyOf("a", "b"));
    EXPECT_FALSE(t.precision.step(t.of_b).applied);
    t.expect_weights(1.1, 1.1);
    EXPECT_LT(t.precision.loss_scale(), before);
  });
}

TEST(Apart, WithoutUnusedParametersAStepThatHasToReduceWhatOneRankLacksIsAnErrorOnAll) {
  const auto train = [](ApartTrainer& t) {
    t.backward_of_first(1.0);
    for (optim::Optimizer* optimizer : {&t.of_a, &t.of_b}) {
      EXPECT_THAT(refusal([&] { t.precision.step(*optimizer); }),
                  testing::AllOf(HasSubstr("'a'"), HasSubstr("on rank 1"),
                                 HasSubstr("find_unused_parameters")));
    }
    t.expect_weights(1.1, 1.1);
  };
  expect_apart(train, false);
}

/// A backward that reduces at the end of the accumulation: what one rank lost counts as a zero.
TEST(Apart, WithoutUnusedParametersRanksReduceWhatOneHasLost) {
  const auto train = [](ApartTrainer& t) {
    for (int step = 1; step <= 2; ++step) {
      t.backward_of_first(1.0);
      t.backward(1.0);
      t.step(t.of_a);
      t.step(t.of_b);
      t.expect_weights(1.1 - 0.15 * step, 1.1 - 0.15 * step);
    }
  };
  expect_apart(train, false);
}

/// What was stashed on one rank only, ahead of a loss of another scale.
TEST(Apart, WithoutUnusedParametersAStashThatOneRankLacksIsAnErrorOnAll) {
  const auto train = [](ApartTrainer& t) {
    t.backward_of_first(1.0, 0);
    t.backward(1.0, 1);
    EXPECT_THAT(refusal([&] { t.precision.step(t.of_a); }), HasSubstr("find_unused_parameters"));
  };
  expect_apart(train, false);
}

TEST(Apart, ARefusalOfOneRanksStepIsAnErrorOnAll) {
  expect_apart([](ApartTrainer& t) {
    {
      const auto guard = t.ddp.no_sync();
      if (t.loses()) {
        t.precision.backward(t.ddp(input(1.0)), {.delay_unscale = true});
      } else {
        t.backward(1.0);
      }
    }
    EXPECT_THAT(refusal([&] { t.precision.step(t.of_a); }), HasSubstr("delay_unscale"));
  });
}

}  // namespace
}  // namespace cairn::orders
