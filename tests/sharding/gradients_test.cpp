// Gradients of which each rank keeps its part (ZeRO, stage 2): what may be asked of them, and that
// ranks agree on what only some of them hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/kernels/multi_tensor.h"
#include "cairn/optim/accumulation.h"
#include "parallel/ranks.h"
#include "sharding/side_by_side.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using test::expect_bits_of_plain;
using test::inputs;
using test::kGradients;
using test::loss_of;
using test::ranks_in_order;
using ::testing::HasSubstr;

const parallel::ShardedOptions kStage2{.stage = parallel::ZeroStage::gradients};

/// A training of OddNet in f32 by one optimizer.
struct Plain {
  Plain(const parallel::ProcessGroup& group, test::Stage stage,
        const parallel::DistributedOptions& options = {}) {
    if (stage)
      ddp = std::make_unique<parallel::ShardedDataParallel>(
          net, group, parallel::ShardedOptions{*stage, options});
    if (!stage) ddp = std::make_unique<parallel::DistributedDataParallel>(net, group, options);
    optimizer =
        std::make_unique<optim::FusedAdam>(net.parameters(), optim::AdamOptions{.lr = 1e-2});
  }
  test::OddNet net;
  std::unique_ptr<parallel::DistributedDataParallel> ddp;
  std::unique_ptr<optim::Optimizer> optimizer;
};

TEST(DividedGradient, IsNotHandedOutForTheWhole) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Plain training(group, kGradients);
    autograd::backward(loss_of((*training.ddp)(inputs(group, 1))));
    const Tensor weight = training.net.parameters().front().tensor;
    EXPECT_THAT(test::message_of([&] { (void)weight.grad(); }),
                HasSubstr("got this rank's part of it"));
    EXPECT_TRUE(training.optimizer->step().applied);
    EXPECT_FALSE(weight.grad().defined());
  });
}

/// A weight's gradient is the mean of what the ranks give to the forward.
class Leaf : public nn::Module {
 public:
  static constexpr std::int64_t kSize = 4000;
  Leaf() : weight_(add_parameter("weight", Tensor::full({kSize}, 1.0))) {}
  std::string kind() const override { return "Leaf"; }
  Tensor forward(const Tensor& x) override { return autograd::sum(autograd::mul(weight_, x)); }

 private:
  Tensor weight_;
};

// One element is not finite, in each rank's part in turn, by another rank's loss: all skip.
TEST(DividedGradient, ThatIsNotFiniteIsSkippedByAll) {
  test::run_threads(ranks_in_order(), [](parallel::ProcessGroup& group) {
    const int ranks = group.world_size();
    Leaf net, same;
    parallel::ShardedDataParallel sharded(net, group, kStage2);
    parallel::DistributedDataParallel plain(same, group);
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    const auto backward = [&](int whose) {
      std::vector<float> gradient(Leaf::kSize, 1.0F);
      const core::ElementRange part = core::even_part(Leaf::kSize, whose, ranks);
      const auto infinite = static_cast<std::size_t>(part.end - 1);
      if (group.rank() == (whose + 1) % ranks)
        gradient[infinite] = std::numeric_limits<float>::infinity();
      const Tensor x = Tensor::from(gradient, {Leaf::kSize});
      autograd::backward(sharded(x));
      autograd::backward(plain(x));
      const std::vector<double> reduced = same.parameters()[0].tensor.grad().to_vector();
      for (std::size_t i = 0; i < reduced.size(); ++i)
        ASSERT_EQ(std::isfinite(reduced[i]), i != infinite) << i;
    };
    for (int whose = 0; whose < ranks; ++whose) {
      backward(whose);
      const optim::StepResult skipped = expected.step(), got = optimizer.step();
      EXPECT_FALSE(skipped.applied);
      EXPECT_EQ(got.applied, skipped.applied) << "in the part of rank " << whose;
      EXPECT_EQ(got.reason, skipped.reason);
      EXPECT_EQ(got.culprit, skipped.culprit);
      EXPECT_EQ(test::difference_of_weights(net, same), "");
    }
  });
}

// What lies in one rank's part alone is an error of all, where that is asked for.
// The average lies on rank 0 alone: these parameters are smaller than what is cut.
TEST(DividedGradient, ThatIsNotFiniteInAnotherRanksPartNamesWhose) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    nn::Linear net(3, 2);
    parallel::ShardedDataParallel sharded(net, group, {.stage = parallel::ZeroStage::gradients});
    optim::FusedSGD optimizer(net.parameters(), {.lr = 0.1});
    amp::Amp precision =
        amp::initialize(net, optimizer, {.opt_level = amp::OptLevel::O0, .world = sharded.world()});
    for (const int guilty : {1, 0, 1}) {
      const double factor = group.rank() == guilty ? std::numeric_limits<double>::infinity() : 1.0;
      precision.backward(autograd::affine(loss_of(sharded(inputs(group, 1, 3))), factor, 0.0));
      EXPECT_THAT(precision.step().reason, HasSubstr(core::str("on rank ", guilty, ",")));
    }
  });
}

TEST(DividedGradient, ThatNobodyLookedAtAccusesNoRank) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    nn::Linear net(3, 2);
    parallel::ShardedDataParallel sharded(
        net, group,
        {.stage = parallel::ZeroStage::gradients, .distributed = {.check_local_gradients = false}});
    optim::FusedSGD optimizer(net.parameters(), {.lr = 0.1});
    amp::Amp precision =
        amp::initialize(net, optimizer, {.opt_level = amp::OptLevel::O0, .world = sharded.world()});
    const double factor = group.rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
    precision.backward(autograd::affine(loss_of(sharded(inputs(group, 1, 3))), factor, 0.0));
    EXPECT_THAT(precision.step().reason, HasSubstr("in the sum over ranks"));
  });
}

TEST(DividedGradient, ThatIsNotFiniteIsAnErrorOfAll) {
  class TwoLeaves : public nn::Module {
   public:
    TwoLeaves()
        : small_(add_parameter("small", Tensor::full({3}, 1.0))),
          large_(add_parameter("large", Tensor::full({4000}, 1.0))) {}
    std::string kind() const override { return "TwoLeaves"; }
    Tensor forward(const Tensor& x) override {
      return autograd::sum(small_) * x + autograd::sum(large_);
    }

   private:
    Tensor small_, large_;
  };
  test::run_threads(3, [](parallel::ProcessGroup& group) {
    TwoLeaves net;
    parallel::ShardedDataParallel sharded(net, group, kStage2);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision =
        amp::initialize(net, optimizer, {.opt_level = amp::OptLevel::O0, .world = sharded.world()});
    const double factor = group.rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
    precision.backward(sharded(Tensor::full({}, factor)));
    EXPECT_THAT(
        test::message_of<core::Error>([&] { (void)precision.step({.error_if_nonfinite = true}); }),
        HasSubstr("expected finite gradients, got inf in the gradient of small"));
  });
}

// The wrapper is gone: another one's gradients lie in buffers again, and are reduced.
TEST(DividedGradient, MayBeWholeAgain) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net, same;
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    {
      parallel::ShardedDataParallel sharded(net, group, kStage2);
      autograd::backward(loss_of(sharded(inputs(group, 1))));
    }
    optimizer.clear_grad();
    parallel::DistributedDataParallel ddp(net, group), plain(same, group);
    for (std::uint64_t step = 0; step < 2; ++step) {
      autograd::backward(loss_of(ddp(inputs(group, step))));
      autograd::backward(loss_of(plain(inputs(group, step))));
      for (const auto& [name, tensor] : net.parameters()) {
        EXPECT_TRUE(tensor.gradient_slot().placed()) << name;
        EXPECT_EQ(tensor.gradient_slot().state(), core::GradientSlot::State::reduced) << name;
      }
      ASSERT_TRUE(optimizer.step().applied);
      ASSERT_TRUE(expected.step().applied);
      ASSERT_EQ(test::difference_of_weights(net, same), "") << step;
    }
  });
}

// Norms of every type, for all and by group.
TEST(DividedGradient, HasTheNormsOfTheWhole) {
  test::run_threads(ranks_in_order(), [](parallel::ProcessGroup& group) {
    Plain training(group, kGradients), plain(group, test::kPlain);
    for (Plain* one : {&training, &plain})
      autograd::backward(loss_of((*one->ddp)(inputs(group, 2))));
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const optim::GradientReport expected = plain.optimizer->begin_check(type).read();
      const optim::GradientReport got = training.optimizer->begin_check(type).read();
      EXPECT_EQ(got.squared_norm, expected.squared_norm) << type;
      EXPECT_EQ(got.group_norms, expected.group_norms) << type;
      EXPECT_EQ(got.norms_of(type), expected.norms_of(type)) << type;
    }
  });
}

// What one rank's loss does not reach, what no rank's does, and what is frozen.
TEST(DividedGradient, OfParametersThatLossesDoNotReach) {
  class TwoHeads : public nn::Module {
   public:
    TwoHeads() {
      manual_seed(5);
      heads_ = {add_module("a", nn::Linear(test::kInputs, 300)),
                add_module("b", nn::Linear(test::kInputs, 300)),
                add_module("c", nn::Linear(test::kInputs, 300)),
                add_module("frozen", nn::Linear(test::kInputs, 300))};
      for (NamedTensor& p : heads_[3]->parameters()) p.tensor.set_requires_grad(false);
    }
    std::string kind() const override { return "TwoHeads"; }
    Tensor forward(const Tensor& x) override {
      return autograd::add((*heads_[head])(x), (*heads_[3])(x));
    }
    std::size_t head = 0;

   private:
    std::vector<std::shared_ptr<nn::Linear>> heads_;
  };
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    expect_bits_of_plain<TwoHeads>(
        group,
        [&](auto& net, auto& ddp, std::uint64_t step) {
          net.head = step % 2 == 0 ? static_cast<std::size_t>(group.rank()) : 0;
          autograd::backward(loss_of(ddp(inputs(group, step))));
        },
        {.stage = parallel::ZeroStage::gradients, .distributed = {.find_unused_parameters = true}});
  });
}

// Ranks with unequal numbers of batches.
TEST(DividedGradient, OfUnevenInputs) {
  test::run_threads(ranks_in_order(), [](parallel::ProcessGroup& group) {
    Plain training(group, kGradients), plain(group, test::kPlain);
    for (Plain* one : {&training, &plain}) {
      auto join = one->ddp->join();
      for (int batch = 0; batch < 1 + group.rank(); ++batch) {
        autograd::backward(loss_of((*one->ddp)(inputs(group, static_cast<unsigned>(batch)))));
        ASSERT_TRUE(one->optimizer->step().applied);
      }
      while (join.other_ranks_have_batches()) {
        autograd::backward(join.zero());
        ASSERT_TRUE(one->optimizer->step().applied);
      }
    }
    EXPECT_EQ(test::difference_of_weights(training.net, plain.net), "");
  });
}

// An accumulation window reduces each micro-batch, and steps once.
TEST(DividedGradient, AddsUpOverAnAccumulation) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Plain training(group, kGradients), plain(group, test::kPlain);
    optim::Accumulation accumulation({.steps = 4, .world = training.ddp->world()});
    for (std::uint64_t batch = 0; batch < 8; ++batch) {
      const auto micro = accumulation.begin(4);
      for (Plain* one : {&training, &plain})
        autograd::backward(
            autograd::affine(loss_of((*one->ddp)(inputs(group, batch))), micro.weight(), 0.0));
      if (!micro.last()) {
        (void)plain.optimizer->stash();
        continue;
      }
      const optim::StepOptions options{.gradient_scale = accumulation.finish()};
      ASSERT_TRUE(training.optimizer->step(options).applied);
      ASSERT_TRUE(plain.optimizer->step(options).applied);
      ASSERT_EQ(test::difference_of_weights(training.net, plain.net), "") << batch;
    }
  });
}

// A backward that throws on one rank: the others hear why, and nobody steps.
TEST(DividedGradient, OfABackwardThatThrewIsBroken) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Plain training(group, kGradients);
    const Tensor first = training.net.parameters().front().tensor;
    const auto hook = autograd::on_gradient_ready(first, [&](const Tensor&) {
      if (group.rank() == 1) throw core::Error("[test] the trainer's own");
    });
    EXPECT_THROW(autograd::backward(loss_of((*training.ddp)(inputs(group, 3)))), core::Error);
    EXPECT_THROW((void)training.optimizer->step(), core::Error);
  });
}

// Reduced in f32, and divided before and after the sum.
TEST(DividedGradient, TravelsAsTheOptionsSay) {
  test::run_threads(ranks_in_order(), [](parallel::ProcessGroup& group) {
    const parallel::DistributedOptions options{.first_bucket_bytes = 100,
                                               .bucket_bytes = 3000,
                                               .allreduce_always_fp32 = true,
                                               .gradient_predivide_factor = 2.0};
    test::OddNet net, same;
    parallel::ShardedDataParallel sharded(
        net, group, {.stage = parallel::ZeroStage::gradients, .distributed = options});
    parallel::DistributedDataParallel plain(same, group, options);
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    const amp::Options level{.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16};
    amp::Options of_sharded = level, of_plain = level;
    of_sharded.world = sharded.world();
    of_plain.world = plain.world();
    amp::Amp a = amp::initialize(net, optimizer, of_sharded);
    amp::Amp b = amp::initialize(same, expected, of_plain);
    for (std::uint64_t step = 0; step < 3; ++step) {
      a.backward(loss_of(sharded(inputs(group, step))));
      b.backward(loss_of(plain(inputs(group, step))));
      ASSERT_TRUE(a.step().applied);
      ASSERT_TRUE(b.step().applied);
      ASSERT_EQ(test::difference_of_weights(net, same), "") << step;
    }
    EXPECT_GT(sharded.buckets().size(), 3U);
  });
}

// A reducer on arrays of one's own.
TEST(ShardedReducer, HandsOutParts) {
  test::run_threads(3, [](parallel::ProcessGroup& group) {
    parallel::Reducer reducer(group, {.bucket_bytes = 4096, .average = false, .shard = true});
    const std::vector<std::int64_t> sizes = {5, 2048, 4000, 1};
    NamedTensors gradients;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::vector<float> values;
      for (std::int64_t k = 0; k < sizes[i]; ++k)
        values.push_back(static_cast<float>(3 * k + group.rank()));
      gradients.push_back({core::str("g", i), Tensor::from(values, {sizes[i]})});
    }
    reducer.register_gradients(gradients);
    std::vector<Tensor> parts(sizes.size());
    reducer.on_part([&](std::size_t i, const Tensor& part) { parts[i] = part; });
    for (int pass = 0; pass < 3; ++pass) {
      for (std::size_t i = 0; i < sizes.size(); ++i) reducer.mark_ready(i);
      reducer.wait();
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const auto own = core::even_part(sizes[i], group.rank(), 3);
        std::vector<double> expected;
        for (std::int64_t k = own.begin; k < own.end; ++k)
          expected.push_back(static_cast<double>(9 * k + 3));
        EXPECT_EQ(parts[i].to_vector(), expected) << i << " pass " << pass;
      }
    }
  });
}

// What nobody keeps is free again, but not before the collective has been there.
TEST(ShardedReducer, PartsThatNobodyKeepsAreWrittenInPeace) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    parallel::Reducer reducer(group, {.average = false, .shard = true});
    const Tensor gradient = Tensor::full({6144}, 1.0 + group.rank()), kept = Tensor::zeros({3072});
    reducer.register_gradients({{"g", gradient}});
    std::size_t bytes = 0;
    reducer.on_part([&](std::size_t, const Tensor& part) {
      bytes = part.storage()->bytes();
      kernels::copy(part, kept);
    });
    for (int pass = 0; pass < 3; ++pass) {
      reducer.mark_ready(0);
      const Tensor other = Tensor::full({static_cast<std::int64_t>(bytes / 4)}, 7.0);
      reducer.wait();
      EXPECT_EQ(kept.to_vector(), std::vector<double>(3072, 3.0)) << "pass " << pass;
      EXPECT_EQ(other.to_vector(), std::vector<double>(bytes / 4, 7.0)) << "pass " << pass;
    }
  });
}

TEST(ShardedReducer, OfOneRankHandsOutTheWhole) {
  parallel::Reducer reducer(parallel::ProcessGroup::single(), {.shard = true});
  const Tensor gradient = test::normal_tensor({2000}, 4);
  reducer.register_gradients({{"g", gradient}});
  Tensor seen;
  reducer.on_part([&](std::size_t, const Tensor& part) { seen = part; });
  reducer.mark_ready(0);
  reducer.wait();
  EXPECT_EQ(seen.to_vector(), gradient.to_vector());
}

TEST(ShardedReducer, RefusesWhatItCannotDivide) {
  const auto hook = parallel::communication_hook(
      [](const parallel::GradientBucket&, const parallel::ProcessGroup&) {});
  const auto group = parallel::ProcessGroup::single();
  EXPECT_THAT(test::message_of<core::InvalidArgument>(
                  [&] { parallel::Reducer(group, {.shard = true, .hook = hook}); }),
              HasSubstr("expected no hook"));
  parallel::Reducer reducer(group, {.shard = true});
  const TensorView nowhere(nullptr, {4}, DType::f32, core::default_device());
  reducer.register_gradients({"g"}, {nowhere});
  EXPECT_THAT(test::message_of([&] { reducer.mark_ready(0); }), HasSubstr("with memory"));
  EXPECT_THAT(test::message_of([&] { reducer.mark_ready(0, Tensor::zeros({5})); }),
              HasSubstr("expected f32[4]"));
}

// Cuts that fall between any blocks, in the midst of chunks too.
TEST(SumPieces, JoinToTheSumOfTheWhole) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t numel : {1, 1023, 1025, 16384, 16385, 70000}) {
      const Tensor x = autograd::to(test::normal_tensor({numel}, 3), dtype);
      for (const double p : {1.0, 2.0, 2.5, std::numeric_limits<double>::infinity()}) {
        const kernels::TensorCheck whole = kernels::check_tensors({x}, p).read()[0];
        for (const int ranks : {2, 3, 7}) {
          std::vector<kernels::CheckedPiece> pieces;
          for (int rank = 0; rank < ranks; ++rank) {
            for (const auto& piece :
                 kernels::pieces_of(core::even_part(numel, rank, ranks), numel)) {
              const TensorView view = x.view().slice(0, piece.begin, piece.end);
              pieces.push_back({piece, kernels::check_tensors({view}, p).read()[0]});
            }
          }
          EXPECT_EQ(kernels::join_pieces(pieces, p).power_sum, whole.power_sum)
              << dtype << ' ' << numel << ' ' << p << ' ' << ranks;
        }
      }
    }
  }
}

}  // namespace
}  // namespace cairn
