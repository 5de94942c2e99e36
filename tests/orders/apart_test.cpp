// What only some ranks of a data-parallel job have, since a backward threw on the others: what all share stays the same.
#include <chrono>

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

}  // namespace
}  // namespace cairn::orders
