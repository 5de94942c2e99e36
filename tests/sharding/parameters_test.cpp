// Weights that lie in parts on the ranks (ZeRO, stage 3): what they take, when they are whole, and
// what a use at another time says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cairn/checkpointing/recompute.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/weight_average.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"
#include "support/step.h"

namespace cairn {
namespace {

using test::inputs;
using test::kAdam;
using test::kParameters;
using test::loss_of;
using test::Recipe;
using test::Training;
using ::testing::HasSubstr;

const parallel::ShardedOptions kStage3{.stage = parallel::ZeroStage::parameters};
std::size_t held(core::MemoryCategory category) {
  return core::memory_stats(core::default_device()).of(category);
}

bool has_memory(const Tensor& weight) {
  return weight.storage()->has_memory();
}

/// `f` for the sharded net and for the same one under DistributedDataParallel: weights agree.
template <class Net, class F>
void expect_bits_of_plain(const parallel::ProcessGroup& group, F&& f,
                          const parallel::ShardedOptions& options = kStage3) {
  Net net, same;
  parallel::ShardedDataParallel sharded(net, group, options);
  parallel::DistributedDataParallel plain(same, group, options.distributed);
  optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
  for (std::uint64_t step = 0; step < 4; ++step) {
    f(net, sharded, step);
    f(same, plain, step);
    test::expect_applied(optimizer.step());
    test::expect_applied(expected.step());
    const auto whole = sharded.gather_parameters();
    ASSERT_EQ(test::difference_of_weights(net, same), "") << step;
  }
}

// 16 n / N bytes between steps; beside them, in a step, the unit at work and those that are fetched
// meanwhile: not one more, and not one less.
TEST(WeightMemory, IsWhatTheFormulaSays) {
  struct Form {
    int prefetch;
    std::int64_t most_gathered;
    std::size_t units;  // that are whole or on their way
  };
  constexpr std::int64_t kUnit = 301 * 301 + 301;
  test::run_ranks(3, [](parallel::ProcessGroup& group) {
    for (const Form form : {Form{1, 0, 2}, Form{0, 0, 1}, Form{2, 0, 3}, Form{7, 3 * kUnit, 3},
                            Form{7, 3 * kUnit - 1, 2}, Form{7, 1, 1}}) {
      SCOPED_TRACE(core::str(form.prefetch, " ahead, at most ", form.most_gathered));
      nn::Sequential net;
      for (int i = 0; i < 8; ++i) net.add(nn::Linear(301, 301));
      parallel::ShardedDataParallel sharded(net, group,
                                            {.stage = parallel::ZeroStage::parameters,
                                             .prefetch = form.prefetch,
                                             .most_gathered = form.most_gathered});
      optim::FusedAdam optimizer(net.parameters());
      amp::Amp precision = amp::initialize(
          net, optimizer,
          {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
      std::size_t elements = 0, tensors = 0;
      for (const auto& [name, tensor] : net.parameters()) {
        elements += static_cast<std::size_t>(tensor.numel());
        ++tensors;
      }
      const std::size_t block = 1024 * tensors, units = form.units * elements / 8;
      const auto expect_parts = [&](std::size_t bytes, std::size_t held_bytes) {
        EXPECT_GE(held_bytes, bytes * elements / 3 - bytes * block);
        EXPECT_LE(held_bytes, bytes * elements / 3 + bytes * block);
      };
      for (int step = 0; step < 3; ++step) {
        core::reset_peak_memory(core::default_device());
        precision.backward(loss_of(sharded(inputs(group, 1, 301))));
        expect_parts(2, held(core::MemoryCategory::parameters));
        expect_parts(2, held(core::MemoryCategory::gradients));
        const auto peak = core::memory_stats(core::default_device());
        const std::size_t of_weights = peak.peak_of(core::MemoryCategory::parameters);
        if (step > 0) {  // the order of the units is known
          EXPECT_LE(of_weights, 2 * elements / 3 + 2 * block + 2 * units);
          EXPECT_GE(of_weights, 2 * elements / 3 - 2 * block + 2 * units);
        }
        ASSERT_TRUE(precision.step().applied);
        expect_parts(2, held(core::MemoryCategory::parameters));
        expect_parts(12, held(core::MemoryCategory::optimizer_state));
        EXPECT_EQ(held(core::MemoryCategory::gradients), 0U);
      }
    }
  });
}

// Between a forward and the backward 2 n / reshard_within bytes more.
TEST(WeightMemory, AfterAForwardIsThatOfTheGroupsParts) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "of CPUs";
  test::run_ranks(4, [](parallel::ProcessGroup& group) {
    nn::Sequential net;
    for (int i = 0; i < 8; ++i) net.add(nn::Linear(301, 301));
    parallel::ShardedOptions options = kStage3;
    options.reshard_within = 2;
    parallel::ShardedDataParallel sharded(net, group, options);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
    constexpr std::size_t kElements = 8 * (301 * 301 + 301), kBlocks = 16 * 1024;
    const auto expect_held = [](std::size_t bytes, const char* when) {
      SCOPED_TRACE(when);
      EXPECT_NEAR(held(core::MemoryCategory::parameters), bytes, 2.0 * kBlocks);
    };
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = loss_of(sharded(inputs(group, 1, 301)));
      expect_held(2 * kElements / 4 + 2 * kElements / 2, "after the forward");
      {
        const autograd::NoGradGuard no_grad;
        (void)sharded(inputs(group, 2, 301));
      }
      expect_held(2 * kElements / 4 + 2 * kElements / 2, "after an evaluation");
      precision.backward(loss);
      expect_held(2 * kElements / 4, "after the backward");
      (void)sharded(inputs(group, 3, 301));  // has no backward
      ASSERT_TRUE(precision.step().applied);
      expect_held(2 * kElements / 4, "after the step");
    }
  });
}

TEST(WeightsInParts, AreWholeOnlyWhereTheyAreUsed) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(5, 600), nn::Linear(600, 300), nn::Linear(300, 5));
    parallel::ShardedDataParallel sharded(net, group, kStage3);
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
    parallel::ShardedDataParallel sharded(net, group, kStage3);
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
    parallel::ShardedDataParallel sharded(net, group, kStage3);
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

// The weights of the unit behind are on their way then, and their memory is free again.
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
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    bool throws = false;
    nn::Sequential net(nn::Linear(test::kInputs, 600), Throws(throws), nn::Linear(600, 300));
    parallel::ShardedDataParallel sharded(net, group, kStage3);
    const auto grad = autograd::GradModeGuard(false);
    const auto expected = sharded(inputs(group, 1)).to_vector();
    throws = true;
    EXPECT_THROW((void)sharded(inputs(group, 1)), core::Error);
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

// Blocks that run their forward again in the backward.
class Recomputed : public nn::Module {
 public:
  Recomputed() {
    manual_seed(4);
    for (int i = 0; i < 3; ++i)
      blocks_.push_back(add_module(core::str("block", i),
                                   nn::Sequential(nn::Linear(test::kInputs, 300), nn::Tanh(),
                                                  nn::Linear(300, test::kInputs))));
  }
  std::string kind() const override { return "Recomputed"; }
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (const auto& block : blocks_)
      y = checkpointing::checkpoint([block](const Tensor& in) { return (*block)(in); }, y);
    return y;
  }

 private:
  std::vector<std::shared_ptr<nn::Sequential>> blocks_;
};

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
    parallel::ShardedOptions options = kStage3;
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

// Whatever is gathered when, results are the same.
TEST(WeightsInParts, HaveTheSameBitsWhateverTheUnits) {
  std::vector<parallel::ShardedOptions> forms(8, kStage3);
  forms[0].prefetch = 0;
  forms[1].reshard_after_forward = false;
  forms[2].units = {"tied"};
  forms[3].units = {"first", "norm", "last"};
  forms[4].prefetch = 3;
  forms[5].prefetch = 3, forms[5].most_gathered = 20'000;
  forms[6].keep_whole = test::kHidden;  // biases and norms
  forms[7].keep_whole = 1'000'000, forms[7].reshard_after_forward = false;
  for (const auto& options : forms) {
    test::run_threads(2, [&](parallel::ProcessGroup& group) {
      expect_bits_of_plain<test::OddNet>(
          group,
          [&](auto&, auto& ddp, std::uint64_t step) {
            autograd::backward(loss_of(ddp(inputs(group, step))));
            (void)ddp(inputs(group, 50 + step));  // has no backward
          },
          options);
    });
  }
}

// Whoever gathers from whom: parts of a smaller group, between steps those of all.
TEST(WeightsInParts, MayStayInASmallerGroup) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "of CPUs";
  std::vector<parallel::ShardedOptions> forms(5, kStage3);
  forms[1].shard_within = 4, forms[1].prefetch = 3;
  forms[2].units = {"tied"}, forms[2].keep_whole = test::kHidden;
  forms[3].distributed.find_unused_parameters = true;
  forms[4].reshard_within = 1;
  for (auto& options : forms) {
    if (options.reshard_within == 0) options.reshard_within = 2;
    test::run_threads(4, [&](parallel::ProcessGroup& group) {
      const auto run = [&](auto& /*net*/, auto& ddp, std::uint64_t step) {
        const Tensor first = loss_of(ddp(inputs(group, 20 + step)));
        const Tensor second = loss_of(ddp(inputs(group, 40 + step)));
        {
          const autograd::NoGradGuard no_grad;
          (void)ddp(inputs(group, 60 + step));
        }
        {
          const auto no_sync = ddp.no_sync();
          autograd::backward(first);
          autograd::backward(second);
        }
        autograd::backward(loss_of(ddp(inputs(group, step))));
        (void)ddp(inputs(group, 80 + step));  // has no backward
      };
      expect_bits_of_plain<test::OddNet>(group, run, options);
    });
  }
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    parallel::ShardedOptions options = kStage3;
    options.reshard_within = 2;
    expect_bits_of_plain<Recomputed>(
        group,
        [&](auto&, auto& ddp, std::uint64_t step) {
          autograd::backward(loss_of(ddp(inputs(group, step))));
        },
        options);
  });
}

TEST(WeightsInParts, StayInGroupsThatDivideTheRanks) {
  const auto refused = [](parallel::ProcessGroup& group, parallel::ShardedOptions options) {
    test::OddNet net;
    options.stage = parallel::ZeroStage::parameters;
    return test::message_of<core::InvalidArgument>(
        [&] { parallel::ShardedDataParallel(net, group, options); });
  };
  test::run_threads(4, [&](parallel::ProcessGroup& group) {
    EXPECT_THAT(refused(group, {.reshard_within = 3}),
                HasSubstr("expected reshard_within to divide the number of ranks, 4, got 3"));
    EXPECT_THAT(refused(group, {.shard_within = 2, .reshard_within = 4}),
                HasSubstr("expected reshard_within to divide the number of ranks, 2, got 4"));
    EXPECT_THAT(refused(group, {.reshard_after_forward = false, .reshard_within = 2}),
                HasSubstr("expected no reshard_within with reshard_after_forward = false, got 2"));
  });
}

// Of a MiB and more: they are gathered where they lie.
TEST(WeightsInParts, MayBeLarge) {
  class Large : public nn::Sequential {
   public:
    Large() {
      manual_seed(12);
      add(nn::Linear(test::kInputs, 601));
      add(nn::Linear(601, 603));
      add(nn::Linear(603, 3));
    }
  };
  for (const auto stage : {parallel::ZeroStage::optimizer_states, kStage3.stage}) {
    test::run_threads(test::ranks_in_order(), [&](parallel::ProcessGroup& group) {
      expect_bits_of_plain<Large>(group,
                                  [&](auto&, auto& ddp, std::uint64_t step) {
                                    autograd::backward(loss_of(ddp(inputs(group, step))));
                                  },
                                  {.stage = stage});
    });
  }
}

// Half weights without amp: the optimizer makes their masters, of this rank's part.
TEST(WeightsInParts, OfAHalfModelGetMasters) {
  for (const auto masters : {optim::MasterStorage::f32, optim::MasterStorage::remainder}) {
    test::run_threads(test::ranks_in_order(), [&](parallel::ProcessGroup& group) {
      test::OddNet net, same;
      net.to(DType::bf16);
      same.to(DType::bf16);
      parallel::ShardedDataParallel sharded(net, group, kStage3);
      parallel::DistributedDataParallel plain(same, group);
      optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
      optimizer.set_state_options({.masters = masters});
      expected.set_state_options({.masters = masters});
      for (std::uint64_t step = 0; step < 3; ++step) {
        const Tensor x = autograd::to(inputs(group, step), DType::bf16);
        autograd::backward(loss_of(sharded(x)));
        autograd::backward(loss_of(plain(x)));
        test::expect_applied(optimizer.step());
        test::expect_applied(expected.step());
      }
      std::int64_t elements = 0;
      EXPECT_EQ(test::difference_in_parts(net.state_dict(), same.state_dict(), elements), "");
      EXPECT_GT(elements, 0);
    });
  }
}

// An embedding and a head of one weight, in two units.
class Tied : public nn::Module {
 public:
  Tied() {
    manual_seed(6);
    words_ = add_module("words", nn::Embedding(301, 16));
    block_ = add_module("block", nn::Linear(16, 16));
    head_ = add_module("head", Head(*words_));
  }
  std::string kind() const override { return "Tied"; }
  Tensor forward(const Tensor& ids) override { return (*head_)((*block_)((*words_)(ids))); }

 private:
  class Head : public nn::Module {
   public:
    explicit Head(const nn::Embedding& words)
        : weight_(add_parameter("weight", words.parameters()[0].tensor)) {}
    std::string kind() const override { return "Head"; }
    Tensor forward(const Tensor& x) override { return autograd::linear(x, weight_); }

   private:
    Tensor weight_;
  };
  std::shared_ptr<nn::Embedding> words_;
  std::shared_ptr<nn::Linear> block_;
  std::shared_ptr<Head> head_;
};

TEST(WeightsInParts, MayBeOfTwoUnits) {
  test::run_threads(test::ranks_in_order(), [](parallel::ProcessGroup& group) {
    expect_bits_of_plain<Tied>(group, [&](auto&, auto& ddp, std::uint64_t step) {
      std::vector<std::int64_t> ids;
      for (int i = 0; i < 8; ++i)
        ids.push_back(static_cast<std::int64_t>((step * 31 + 7 * i + group.rank()) % 301));
      autograd::backward(loss_of(ddp(Tensor::from(ids, {2, 4}, DType::i64))));
    });
  });
}

// A frozen base beside small additions: the base has no gradient that says when it is done.
class Adapted : public nn::Module {
 public:
  Adapted() {
    manual_seed(8);
    for (int i = 0; i < 3; ++i) {
      base_.push_back(add_module(core::str("base", i), nn::Linear(test::kInputs, test::kInputs)));
      added_.push_back(add_module(core::str("added", i), nn::Linear(test::kInputs, test::kInputs)));
      for (NamedTensor& p : base_.back()->parameters()) p.tensor.set_requires_grad(false);
    }
  }
  std::string kind() const override { return "Adapted"; }
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (std::size_t i = 0; i < base_.size(); ++i)
      y = autograd::tanh(autograd::add((*base_[i])(y), (*added_[i])(y)));
    return y;
  }

 private:
  std::vector<std::shared_ptr<nn::Linear>> base_, added_;
};

TEST(WeightsInParts, MayBeFrozen) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    expect_bits_of_plain<Adapted>(group, [&](auto&, auto& ddp, std::uint64_t step) {
      autograd::backward(loss_of(ddp(inputs(group, step))));
    });
    Adapted net;
    parallel::ShardedDataParallel sharded(net, group, kStage3);
    autograd::backward(loss_of(sharded(inputs(group, 1))));
    for (const auto& [name, tensor] : net.parameters()) EXPECT_FALSE(has_memory(tensor)) << name;
  });
}

// An optimizer, and amp, after the first forward.
TEST(WeightsInParts, MayHaveAnOptimizerLater) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net, same;
    parallel::ShardedDataParallel sharded(net, group, kStage3);
    parallel::DistributedDataParallel plain(same, group);
    {
      const autograd::NoGradGuard no_grad;
      (void)sharded(inputs(group, 1));
      (void)plain(inputs(group, 1));
    }
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    for (std::uint64_t step = 0; step < 3; ++step) {
      autograd::backward(loss_of(sharded(inputs(group, step))));
      autograd::backward(loss_of(plain(inputs(group, step))));
      test::expect_applied(optimizer.step());
      test::expect_applied(expected.step());
    }
    const auto whole = sharded.gather_parameters();
    EXPECT_EQ(test::difference_of_weights(net, same), "");
  });
}

// A rank whose forward leaves a layer out: an error on all, not a wait.
TEST(WeightsInParts, OfALayerThatARankSkipsAreAnErrorOfAll) {
  class Skips : public nn::Module {
   public:
    Skips()
        : a_(add_module("a", nn::Linear(test::kInputs, 400))),
          b_(add_module("b", nn::Linear(test::kInputs, 400))),
          c_(add_module("c", nn::Linear(400, 2))) {}
    std::string kind() const override { return "Skips"; }
    Tensor forward(const Tensor& x) override { return (*c_)(first ? (*a_)(x) : (*b_)(x)); }
    bool first = true;

   private:
    std::shared_ptr<nn::Linear> a_, b_, c_;
  };
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Skips net;
    net.first = group.rank() == 0;
    parallel::ShardedDataParallel sharded(net, group, kStage3);
    const std::string said =
        test::message_of<core::CommunicationError>([&] { (void)sharded(inputs(group, 1)); });
    EXPECT_THAT(said, HasSubstr("weights a.weight"));
    EXPECT_THAT(said, HasSubstr("weights b.weight"));
  });
}

/// Branches of other depths behind a trunk that not all of them use.
class Branches : public nn::Module {
 public:
  Branches() {
    manual_seed(6);
    trunk_ = add_module("trunk", nn::Linear(test::kInputs, 300));
    branches_ = {
        add_module("deep", nn::Sequential(nn::Linear(300, 300), nn::Tanh(), nn::Linear(300, 5))),
        add_module("flat", nn::Sequential(nn::Linear(300, 5))),
        add_module("aside", nn::Sequential(nn::Linear(test::kInputs, 5))),
        add_module("idle", nn::Sequential(nn::Linear(300, 5)))};
  }
  std::string kind() const override { return "Branches"; }
  Tensor forward(const Tensor& x) override {
    nn::Sequential& branch = *branches_[chosen];
    return branch(chosen == 2 ? x : autograd::tanh((*trunk_)(x)));
  }
  std::size_t chosen = 0;

 private:
  std::shared_ptr<nn::Linear> trunk_;
  std::vector<std::shared_ptr<nn::Sequential>> branches_;
};

// Each rank's graph is another one, in another order, and two of them wait for their backwards.
TEST(WeightsInParts, MayBeUnusedOnSomeRanks) {
  struct Form {
    int ranks, within;
    bool is_static, stay_whole = false;
  };
  for (const Form form : {Form{2, 0, false}, Form{3, 0, false}, Form{4, 2, false}, Form{3, 0, true},
                          Form{3, 0, false, true}}) {
    if (form.ranks > test::ranks_in_order() && core::default_device().is_cuda()) continue;
    SCOPED_TRACE(core::str(form.ranks, " by ", form.within, form.is_static ? ", static" : ""));
    parallel::ShardedOptions options = kStage3;
    options.shard_within = form.within;
    options.reshard_after_forward = !form.stay_whole;
    (form.is_static ? options.distributed.static_graph
                    : options.distributed.find_unused_parameters) = true;
    test::run_threads(form.ranks, [&](parallel::ProcessGroup& group) {
      const auto choose = [&](std::uint64_t step) {
        const auto rank = static_cast<std::uint64_t>(group.rank());
        return static_cast<std::size_t>((form.is_static ? rank : rank + step) % 3);
      };
      expect_bits_of_plain<Branches>(
          group,
          [&](auto& net, auto& ddp, std::uint64_t step) {
            net.chosen = choose(step);
            const Tensor loss = loss_of(ddp(inputs(group, step)));
            using Ddp = std::decay_t<decltype(ddp)>;
            const bool stay =
                form.stay_whole || std::is_same_v<Ddp, parallel::DistributedDataParallel>;
            for (const auto& [name, weight] : net.parameters()) EXPECT_EQ(has_memory(weight), stay);
            {
              const autograd::NoGradGuard no_grad;
              (void)ddp(inputs(group, 50 + step));
            }
            if (step == 2) (void)ddp(inputs(group, 60));  // has no backward
            autograd::backward(loss);
            EXPECT_TRUE(std::find(ddp.unused_parameters().begin(), ddp.unused_parameters().end(),
                                  "idle.0.weight") != ddp.unused_parameters().end());
          },
          options);
    });
  }
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

/// Ranks that gather in another order, or divide something else, would wait for each other.
TEST(ShardedOptions, MustBeTheSameOnAllRanks) {
  struct Pair {
    parallel::ShardedOptions others;
    const char *of_first, *of_others;
  };
  constexpr auto stage = parallel::ZeroStage::parameters;
  const Pair pairs[] = {
      {{.stage = parallel::ZeroStage::gradients}, "stage 3", "stage 2"},
      {{.stage = stage, .units = {"first"}}, "units on rank 0", "units 'first'"},
      {{.stage = stage, .reshard_after_forward = false},
       "reshard_after_forward true",
       "reshard_after_forward false"},
      {{.stage = stage, .reshard_within = 2}, "reshard_within 0", "reshard_within 2"},
      {{.stage = stage, .prefetch = 2}, "prefetch 1", "prefetch 2"},
      {{.stage = stage, .most_gathered = 7}, "most_gathered 0", "most_gathered 7"},
      {{.stage = stage, .keep_whole = 7}, "keep_whole 0", "keep_whole 7"}};
  test::run_threads(2, [&](parallel::ProcessGroup& group) {
    const bool first = group.rank() == 0;
    test::OddNet net;
    const auto refused = [&](const auto& make, const char* one, const char* other) {
      const std::string message = test::message_of<core::InvalidArgument>(make);
      EXPECT_THAT(message, HasSubstr(one));
      EXPECT_THAT(message, HasSubstr(other));
    };
    for (const Pair& pair : pairs) {
      refused([&] { parallel::ShardedDataParallel(net, group, first ? kStage3 : pair.others); },
              pair.of_first, pair.of_others);
    }
    const auto either = [&] {
      if (first) parallel::ShardedDataParallel(net, group);
      if (!first) parallel::DistributedDataParallel(net, group);
    };
    refused(either, "stage 1 on rank 0", "stage 0 on rank 1");
  });
}

TEST(WeightsInParts, AreGatheredByNumbersThatAreNotNegative) {
  test::OddNet net;
  EXPECT_THAT(test::message_of<core::InvalidArgument>([&] {
                parallel::ShardedDataParallel(
                    net, parallel::ProcessGroup::single(),
                    {.stage = parallel::ZeroStage::parameters, .prefetch = -1});
              }),
              HasSubstr("expected prefetch, most_gathered and keep_whole >= 0, got -1, 0 and 0"));
}

TEST(WeightsInParts, OfAllUnitsAtOnceAreNotFetchedAhead) {
  const auto expect_refused = [](parallel::ShardedOptions options, const char* got) {
    options.stage = parallel::ZeroStage::parameters;
    for (const bool is_static : {false, true}) {
      test::OddNet net;
      options.distributed.static_graph = is_static;
      options.distributed.find_unused_parameters = !is_static;
      EXPECT_THAT(test::message_of<core::InvalidArgument>([&] {
                    parallel::ShardedDataParallel(net, parallel::ProcessGroup::single(), options);
                  }),
                  HasSubstr(core::str("which gather all units at once, got ", got)));
    }
  };
  expect_refused({.prefetch = 2}, "2 and 0");
  expect_refused({.prefetch = 0}, "0 and 0");
  expect_refused({.most_gathered = 7}, "1 and 7");
}

// What would have no effect.
TEST(WeightsInParts, AloneHaveOptionsOfTheirs) {
  const auto single = parallel::ProcessGroup::single();
  for (const auto stage : {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::gradients}) {
    const auto expect_refused = [&](parallel::ShardedOptions options, const char* what) {
      test::OddNet net;
      options.stage = stage;
      EXPECT_THAT(test::message_of<core::InvalidArgument>(
                      [&] { parallel::ShardedDataParallel(net, single, options); }),
                  HasSubstr(core::str("expected ", what,
                                      " with ZeroStage::parameters only, got it with stage ",
                                      static_cast<int>(stage))));
    };
    expect_refused({.units = {"first"}}, "units");
    expect_refused({.reshard_after_forward = false}, "reshard_after_forward = false");
    expect_refused({.reshard_within = 2}, "reshard_within");
    expect_refused({.prefetch = 0}, "prefetch");
    expect_refused({.most_gathered = 1}, "most_gathered");
    expect_refused({.keep_whole = 1}, "keep_whole");
  }
}

TEST(WeightsInParts, RefuseWhatNeedsThemWhole) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    parallel::ShardedOptions options = kStage3;
    options.units = {"firt"};
    EXPECT_THAT(test::message_of([&] { parallel::ShardedDataParallel(net, group, options); }),
                HasSubstr("got 'firt'"));
    parallel::ShardedDataParallel sharded(net, group, kStage3);
    EXPECT_THAT(test::message_of<core::Unsupported>([&] { (void)sharded.join(); }),
                HasSubstr("got join()"));
  });
}

}  // namespace
}  // namespace cairn
