// Weights that lie in parts on the ranks (ZeRO, stage 3): when they are whole, and what a use at
// another time says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/kernels/elementwise.h"
#include "cairn/optim/weight_average.h"
#include "parallel/ranks.h"
#include "sharding/side_by_side.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using test::expect_bits_of_plain;
using test::has_memory;
using test::inputs;
using test::kAdam;
using test::kParameters;
using test::loss_of;
using test::Recipe;
using test::Recomputed;
using test::stage_3;
using test::Training;
using ::testing::HasSubstr;

TEST(WeightsInParts, AreWholeOnlyWhereTheyAreUsed) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(5, 600), nn::Linear(600, 300), nn::Linear(300, 5));
    parallel::ShardedDataParallel sharded(net, group, stage_3());
    const NamedTensors weights = net.parameters();
    const Tensor first = weights[0].tensor, middle = weights[2].tensor, last = weights[4].tensor;
    const auto where = [&] {
      return core::str(has_memory(first), has_memory(middle), has_memory(last));
    };
    Tensor loss;
    for (int pass = 0; pass < 2; ++pass) {  // the order of the units is known in the second
      loss = loss_of(sharded(inputs(group, 1, 5)));
      EXPECT_EQ(where(), "000");
      std::string in_last, in_middle;
      const auto hooks = std::pair(
          autograd::on_gradient_ready(last, [&](const Tensor&) { in_last = where(); }),
          autograd::on_gradient_ready(middle, [&](const Tensor&) { in_middle = where(); }));
      autograd::backward(loss);
      EXPECT_EQ(in_last, "001");
      EXPECT_EQ(in_middle, "010");
      EXPECT_EQ(where(), "000");
    }
    EXPECT_EQ(first.shape(), (Shape{600, 5}));
    EXPECT_EQ(first.dtype(), DType::f32);
  });
}

TEST(WeightsInParts, AreAnErrorElsewhere) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Training training(kAdam, group, kParameters);
    test::expect_applied(training.step());
    const Tensor weight = training.net.parameters()[1].tensor;
    const char* what = "gather_parameters(), on every rank, makes weights whole";
    EXPECT_THAT(test::message_of([&] { (void)weight.to_vector(); }), HasSubstr(what));
    EXPECT_THAT(test::message_of([&] { (void)weight.data<core::BFloat16>(); }), HasSubstr(what));
    EXPECT_THAT(test::message_of([&] { kernels::fill(weight, 0.0); }), HasSubstr(what));
    EXPECT_THAT(test::message_of<core::Error>([&] { (void)training.net.clone(); }),
                HasSubstr("built again"));
    EXPECT_THAT(test::message_of<core::Unsupported>(
                    [&] { const optim::WeightAverage average(training.net.parameters()); }),
                HasSubstr("this rank's part"));
    EXPECT_TRUE(training.step().applied);  // nothing of it has changed the training
  });
}

// Read, and written on all ranks alike: as where every rank has all of them.
TEST(WeightsInParts, MayBeGatheredBetweenSteps) {
  for (const bool compact : {false, true}) {
    Recipe recipe = kAdam;
    if (compact) recipe.states.masters = optim::MasterStorage::remainder;
    test::run_threads(test::ranks_in_order(), [&](parallel::ProcessGroup& group) {
      Training training(recipe, group, kParameters), plain(recipe, group, test::kPlain);
      for (int step = 0; step < 4; ++step) {
        test::expect_applied(training.step());
        test::expect_applied(plain.step());
        const auto whole = training.gather();
        ASSERT_EQ(test::difference_of_weights(training.net, plain.net), "");
        for (Training* one : {&training, &plain}) {
          for (const auto& [name, tensor] : one->net.parameters())
            kernels::affine(tensor, 0.5, 0.0, tensor);
        }
      }
      ASSERT_EQ(test::difference_of_weights(training, plain), "");
      std::int64_t elements = 0;
      EXPECT_EQ(
          test::difference_in_parts(training.net.state_dict(), plain.net.state_dict(), elements),
          "");
    });
  }
}

TEST(WeightsInParts, OfAGuardAreNeitherSteppedNorSaved) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    parallel::ShardedDataParallel sharded(net, group, stage_3());
    optim::FusedAdam optimizer(net.parameters());
    autograd::backward(loss_of(sharded(inputs(group, 1))));
    const auto whole = sharded.gather_parameters();
    EXPECT_THAT(test::message_of([&] { (void)sharded.gather_parameters(); }),
                HasSubstr("got another one"));
    const char* what = "gather_parameters() keeps them whole (end it first)";
    EXPECT_THAT(test::message_of([&] { (void)net.state_dict(); }), HasSubstr(what));
    EXPECT_THAT(test::message_of([&] { (void)optimizer.step(); }), HasSubstr(what));
  });
}

// A layer that throws on all ranks, in a forward and in the one after it.
TEST(WeightsInParts, OfAForwardThatThrewAreLetGoOf) {
  class Throws : public nn::Module {
   public:
    Throws()
        : fc_(add_module("fc", nn::Linear(test::kInputs, 600))),
          shift_(add_parameter("shift", Tensor::zeros({600}))) {}
    std::string kind() const override { return "Throws"; }
    Tensor forward(const Tensor& x) override {
      Tensor y = autograd::add((*fc_)(x), shift_);
      if (throws) throw core::Error("[test] the layer's own");
      return y;
    }
    bool throws = false;

   private:
    std::shared_ptr<nn::Linear> fc_;
    Tensor shift_;
  };
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Throws net;
    parallel::ShardedDataParallel sharded(net, group, stage_3());
    optim::FusedAdam optimizer(net.parameters());
    autograd::backward(loss_of(sharded(inputs(group, 1))));
    net.throws = true;
    EXPECT_THROW((void)sharded(inputs(group, 1)), core::Error);
    for (const auto& [name, tensor] : net.parameters()) EXPECT_FALSE(has_memory(tensor)) << name;
    net.throws = false;
    optimizer.clear_grad();
    autograd::backward(loss_of(sharded(inputs(group, 1))));
    EXPECT_TRUE(optimizer.step().applied);
  });
}

// The weights of the unit behind are on their way then, and their memory is free again. What other
// groups do comes after their gather.
TEST(WeightsInParts, OfAForwardThatThrewArriveInPeace) {
  class Throws : public nn::Module {
   public:
    explicit Throws(const bool& throws) : throws_(throws) {
      add_parameter("unused", Tensor::zeros({3}));
    }
    std::string kind() const override { return "Throws"; }
    Tensor forward(const Tensor& x) override {
      if (throws_) throw core::Error("[test] the layer's own");
      return x;
    }

   private:
    const bool& throws_;
  };
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    bool throws = false;
    nn::Sequential net(nn::Linear(test::kInputs, 600), Throws(throws), nn::Linear(600, 300));
    parallel::ShardedDataParallel sharded(net, group, stage_3({.shard_within = 2}));
    const auto grad = autograd::GradModeGuard(false);
    const auto expected = sharded(inputs(group, 1)).to_vector();
    throws = true;
    EXPECT_THROW((void)sharded(inputs(group, 1)), core::Error);
    const Tensor sum = Tensor::full({1000}, 1.0);
    group.all_reduce(sum);
    EXPECT_EQ(sum.to_vector(), std::vector<double>(1000, 4.0));
    const Tensor other = Tensor::full({300, 600}, 7.0);
    throws = false;
    EXPECT_EQ(sharded(inputs(group, 1)).to_vector(), expected);
    EXPECT_EQ(other.to_vector(), std::vector<double>(300 * 600, 7.0));
  });
}

// A forward without a backward, and one between a backward and its step: with the weights as they
// are.
TEST(WeightsInParts, AreThoseOfTodayInAnEvaluation) {
  test::run_threads(test::ranks_in_order(), [](parallel::ProcessGroup& group) {
    std::vector<double> seen;  // by the sharded net, which comes first
    expect_bits_of_plain<test::OddNet>(group, [&](auto& net, auto& ddp, std::uint64_t step) {
      autograd::backward(loss_of(ddp(inputs(group, step))));
      const autograd::NoGradGuard no_grad;
      net.eval();
      const auto now = ddp(inputs(group, 77)).template to_vector<double>();
      net.train();
      using Ddp = std::decay_t<decltype(ddp)>;
      if constexpr (std::is_same_v<Ddp, parallel::ShardedDataParallel>) {
        seen = now;
      } else {
        EXPECT_EQ(now, seen);
      }
    });
  });
}

TEST(WeightsInParts, AreGatheredAgainWhereForwardsAre) {
  test::run_threads(test::ranks_in_order(), [](parallel::ProcessGroup& group) {
    expect_bits_of_plain<Recomputed>(group, [&](auto&, auto& ddp, std::uint64_t step) {
      autograd::backward(loss_of(ddp(inputs(group, step))));
    });
  });
}

// They are updated as in stage 2, and gathered with the update.
TEST(WeightsInParts, MayBeTooSmallForThat) {
  test::run_threads(3, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(5, 600), nn::Linear(600, 3));
    parallel::ShardedOptions options = stage_3();
    options.keep_whole = 1800;  // the second weight, and both biases
    parallel::ShardedDataParallel sharded(net, group, options);
    optim::FusedAdam optimizer(net.parameters());
    for (std::uint64_t step = 0; step < 3; ++step) {
      autograd::backward(loss_of(sharded(inputs(group, step, 5))));
      test::expect_applied(optimizer.step());
      std::string whole;
      for (const auto& [name, weight] : net.parameters()) whole += has_memory(weight) ? '1' : '0';
      EXPECT_EQ(whole, "0111");
    }
    std::vector<std::pair<std::string, StateDict::Value>> states;
    test::tensors_of(optimizer.state_dict(), "", states);
    std::int64_t moments = 0;
    for (const auto& [name, value] : states) {
      if (name.ends_with("exp_avg")) moments += std::get<Shard>(value).tensor.numel();
    }
    EXPECT_LE(moments, 4 * 1024);  // divided all the same
  });
}

TEST(WeightsInParts, OutliveTheirWrapper) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    optim::FusedAdam optimizer(net.parameters());
    {
      const parallel::ShardedOptions options{.stage = parallel::ZeroStage::parameters,
                                             .reshard_after_forward = false};
      parallel::ShardedDataParallel sharded(net, group, options);
      autograd::backward(loss_of(sharded(inputs(group, 1))));
      test::expect_applied(optimizer.step());
      (void)sharded(inputs(group, 1));  // has no backward, and leaves weights whole
      EXPECT_TRUE(has_memory(net.parameters()[0].tensor));
    }
    for (const auto& [name, tensor] : net.parameters()) EXPECT_FALSE(has_memory(tensor)) << name;
    EXPECT_THAT(test::message_of([&] { (void)net(inputs(group, 1)); }),
                HasSubstr("its ShardedDataParallel has ended"));
    std::int64_t elements = 0;
    std::vector<std::pair<std::string, StateDict::Value>> state;
    test::tensors_of(net.state_dict(), "", state);
    for (const auto& [name, value] : state)
      elements += std::holds_alternative<Shard>(value) ? std::get<Shard>(value).tensor.numel() : 0;
    EXPECT_GT(elements, 0);
  });
}

}  // namespace
}  // namespace cairn
