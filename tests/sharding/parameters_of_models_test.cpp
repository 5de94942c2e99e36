// Models whose weights lie in parts (ZeRO, stage 3), against DistributedDataParallel: large, half,
// tied, frozen and unused ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "parallel/ranks.h"
#include "sharding/side_by_side.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using test::expect_bits_of_plain;
using test::has_memory;
using test::inputs;
using test::loss_of;
using test::stage_3;
using ::testing::HasSubstr;

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
  for (const auto stage :
       {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::parameters}) {
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
      parallel::ShardedDataParallel sharded(net, group, stage_3());
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
    parallel::ShardedDataParallel sharded(net, group, stage_3());
    autograd::backward(loss_of(sharded(inputs(group, 1))));
    for (const auto& [name, tensor] : net.parameters()) EXPECT_FALSE(has_memory(tensor)) << name;
  });
}

// An optimizer, and amp, after the first forward.
TEST(WeightsInParts, MayHaveAnOptimizerLater) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net, same;
    parallel::ShardedDataParallel sharded(net, group, stage_3());
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
    parallel::ShardedDataParallel sharded(net, group, stage_3());
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
    parallel::ShardedOptions options = stage_3();
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

}  // namespace
}  // namespace cairn
