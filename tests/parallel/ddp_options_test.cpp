// DistributedDataParallel's options and orders of calls: each against one process on the whole
// batch.
#include <atomic>
#include <chrono>
#include <thread>

#include "cairn/autograd/function.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/error.h"
#include "cairn/kernels/copy.h"
#include "cairn/optim/sgd.h"
#include "ddp_support.h"
#include "ranks.h"
#include "support/expect_error.h"
#include "support/step.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using test::add;
using test::bytes_of;
using test::expect_error;
using test::Gradients;
using test::gradients_of;
using test::loss_of;
using test::normal;
using test::run_ranks;
using test::run_threads;
using test::Tower;
using test::wait_until_broken;
using test::weights_of;

std::uint64_t rank_of(const ProcessGroup& group) {
  return static_cast<std::uint64_t>(group.rank());
}

/// What one process gets that averages (or adds up) the losses of all ranks.
Gradients whole_batch(int world, bool average = true) {
  Tower tower(3);
  Gradients sum;
  for (int rank = 0; rank < world; ++rank) {
    autograd::backward(loss_of(tower, static_cast<std::uint64_t>(rank)));
    add(sum, gradients_of(tower), average ? 1.0 / world : 1.0);
    tower.clear_grad();
  }
  return sum;
}

std::vector<DistributedOptions> options_to_try() {
  const DistributedOptions small{.first_bucket_bytes = 1, .bucket_bytes = 200};
  std::vector<DistributedOptions> all = {small};
  all.push_back({.delay_allreduce = true});
  all.push_back({.allreduce_always_fp32 = true});
  all.push_back({.average = false});
  all.push_back({.gradient_predivide_factor = 2.0});
  all.push_back({.trigger_parameters = {"l1.weight"}, .num_allreduce_streams = 3});
  all.push_back({.retain_allreduce_buffers = true});
  all.push_back({.find_unused_parameters = true});
  all.push_back({.static_graph = true});
  all.push_back({.broadcast_buffers = true});
  return all;
}

void check_options(ProcessGroup& group) {
  for (const DistributedOptions& options : options_to_try()) {
    const Gradients expected = whole_batch(group.world_size(), options.average);
    std::string first;
    for (int run = 0; run < 2; ++run) {
      Tower tower(3);
      DistributedDataParallel ddp(tower, group, options);
      for (int step = 0; step < 3; ++step) {
        autograd::backward(loss_of(ddp, rank_of(group)));
        const Gradients got = gradients_of(tower);
        EXPECT_EQ(test::difference(got, expected, 1e-6), "");
        if (first.empty()) first = bytes_of(got);
        EXPECT_TRUE(bytes_of(got) == first);
        tower.clear_grad();
      }
    }
    for (const std::string& other : group.exchange(first, "bits")) EXPECT_TRUE(other == first);
  }
}

TEST(DdpOptions, EachIsOneProcessOnTheWholeBatch) {
  for (const int world : {1, 2, 4}) run_threads(world, check_options);
}
TEST(DdpOptions, EachIsOneProcessOnTheWholeBatchBetweenProcesses) {
  run_ranks(2, check_options);
}

TEST(DdpOptions, WhatNoRankReachesHasNoGradient) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(3);
    DistributedDataParallel ddp(tower, group, {.find_unused_parameters = true});
    tower.reach = group.rank() == 0 ? 1 : 2;  // nobody uses l2
    autograd::backward(loss_of(ddp, 0));
    const Gradients got = gradients_of(tower);
    EXPECT_TRUE(got.contains("l0.weight") && got.contains("l1.weight"));
    EXPECT_FALSE(got.contains("l2.weight") || got.contains("l2.bias"));
    const std::string other = group.rank() == 0 ? "l1.weight" : "l0.weight";
    EXPECT_THAT(ddp.unused_parameters(), testing::Contains(other));
    EXPECT_THAT(ddp.unused_parameters(), testing::Contains("l2.bias"));
  });
}

TEST(DdpOptions, AStaticGraphThatChangesIsAnErrorThatNamesAParameter) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(2);
    const auto train = [&] {
      DistributedDataParallel ddp(tower, group, {.static_graph = true});
      for (const unsigned reach : {1u, 1u, 3u}) {
        tower.reach = reach;
        autograd::backward(loss_of(ddp, 0));
        tower.clear_grad();
      }
    };
    expect_error<core::Error>(train, {"static_graph", "'l1.", "the first one did not reach"});
  });
}

TEST(DdpOptions, RefusesATriggerThatTheModelLacks) {
  Tower tower(2);
  const auto wrap = [&](const DistributedOptions& options) {
    return [&tower, options] { DistributedDataParallel(tower, ProcessGroup::single(), options); };
  };
  expect_error<InvalidArgument>(wrap({.trigger_parameters = {"l9.weight"}}), {"'l9.weight'"});
  expect_error<InvalidArgument>(wrap({.delay_allreduce = true, .num_allreduce_streams = 2}),
                                {"one stream"});
}

TEST(DdpOptions, BroadcastsBuffersBeforeATrainingForward) {
  run_threads(2, [](ProcessGroup& group) {
    manual_seed(3);
    nn::Sequential model(nn::Linear(4, 4), nn::BatchNorm1d(4));
    DistributedDataParallel ddp(model, group, {.broadcast_buffers = true});
    const auto mean = [&] { return model.buffers()[0].tensor.to_vector<float>(); };
    const Tensor x = normal({5, 4}, rank_of(group));
    const auto before = mean();
    ddp(x);
    const std::vector<float> zeros_after = mean();
    EXPECT_NE(zeros_after, before);
    const auto text = [](const std::vector<float>& v) {
      return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float));
    };
    const auto apart = group.exchange(text(zeros_after), "apart");
    EXPECT_NE(apart[0], apart[1]);
    model.eval();
    if (group.rank() == 0) ddp(x);  // an evaluation alone meets nobody
    EXPECT_EQ(text(mean()), apart[rank_of(group)]);
    model.train();
    ddp(normal({5, 4}, 9));  // the same samples on both, from rank 0's statistics
    const auto together = group.exchange(text(mean()), "together");
    EXPECT_EQ(together[0], together[1]);
  });
}

// ---- Orders of calls

TEST(DdpOrders, RecomputationAndSharedWeights) {
  run_threads(2, [](ProcessGroup& group) {
    const auto loss = [](Tower& tower, std::uint64_t seed, bool recompute) {
      const Tensor x = normal({3, test::kWidth}, 40 + seed);
      const auto twice = [&](const Tensor& y) { return tower(tower(y)); };
      return autograd::mean(recompute ? checkpointing::checkpoint(twice, x) : twice(x));
    };
    Tower plain(2), tower(2);
    Gradients expected;
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      autograd::backward(loss(plain, rank, false));
      add(expected, gradients_of(plain), 0.5);
      plain.clear_grad();
    }
    DistributedDataParallel ddp(tower, group, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    for (int step = 0; step < 2; ++step) {
      autograd::backward(loss(tower, rank_of(group), true));
      EXPECT_EQ(test::difference(gradients_of(tower), expected, 1e-6), "");
      tower.clear_grad();
    }
  });
}

/// A GAN: the generator's loss passes through the discriminator, which is called twice before one
/// backward.
TEST(DdpOrders, TwoModelsTwoOptimizersAndSeveralForwards) {
  run_threads(2, [](ProcessGroup& group) {
    struct Pair {
      Tower d{2, 1}, g{2, 2};
      optim::FusedSGD d_step{d.parameters(), {.lr = 0.1}}, g_step{g.parameters(), {.lr = 0.1}};
    };
    const auto noise = [](std::uint64_t seed) { return normal({3, test::kWidth}, seed); };
    const auto d_loss = [&](auto& d, auto& g, std::uint64_t seed) {
      const Tensor fake = g(noise(seed)).detach();
      return autograd::add(autograd::mean(d(noise(seed + 50))), autograd::mean(d(fake)));
    };
    const auto g_loss = [&](auto& d, auto& g, std::uint64_t seed) {
      return autograd::mean(d(g(noise(seed))));
    };
    Pair plain, both;
    DistributedDataParallel d(both.d, group), g(both.g, group);
    for (std::uint64_t step = 0; step < 3; ++step) {
      for (std::uint64_t rank = 0; rank < 2; ++rank)
        autograd::backward(d_loss(plain.d, plain.g, 10 * step + rank));
      test::expect_applied(plain.d_step.step({.gradient_scale = 0.5}));
      for (std::uint64_t rank = 0; rank < 2; ++rank)
        autograd::backward(g_loss(plain.d, plain.g, 10 * step + rank));
      test::expect_applied(plain.g_step.step({.gradient_scale = 0.5}));
      plain.d.clear_grad();

      autograd::backward(d_loss(d, g, 10 * step + rank_of(group)));
      test::expect_applied(both.d_step.step());
      autograd::backward(g_loss(d, g, 10 * step + rank_of(group)));
      test::expect_applied(both.g_step.step());
      both.d.clear_grad();
    }
    for (const auto& [own, other] : {std::pair{&both.d, &plain.d}, {&both.g, &plain.g}}) {
      for (std::size_t p = 0; p < own->parameters().size(); ++p) {
        const auto a = own->parameters()[p].tensor.to_vector<double>();
        const auto b = other->parameters()[p].tensor.to_vector<double>();
        for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-6);
      }
    }
  });
}

/// A step applies what one process gets that adds up all losses of all ranks.
void check_sums(ProcessGroup& group, bool find_unused) {
  const auto world = static_cast<std::uint64_t>(group.world_size());
  const auto reach = [&](std::uint64_t seed, std::uint64_t rank) {
    return find_unused ? static_cast<unsigned>(1 + (5 * seed + 3 * rank) % 7) : 7U;
  };
  Tower plain(3), tower(3);
  optim::FusedSGD reference(plain.parameters(), {.lr = 0.1}), sgd(tower.parameters(), {.lr = 0.1});
  DistributedDataParallel ddp(tower, group,
                              {.average = false, .find_unused_parameters = find_unused});
  const std::vector<std::vector<bool>> steps = {
      {true}, {false, true}, {false}, {false, false, true}, {false, false}};  // who reduces
  std::uint64_t seed = 0;
  for (const std::vector<bool>& backwards : steps) {
    for (const bool reduces : backwards) {
      ++seed;
      for (std::uint64_t rank = 0; rank < world; ++rank) {
        plain.reach = reach(seed, rank);
        autograd::backward(loss_of(plain, 10 * seed + rank));
      }
      const auto guard = ddp.no_sync(!reduces);
      tower.reach = reach(seed, rank_of(group));
      autograd::backward(loss_of(ddp, 10 * seed + rank_of(group)));
    }
    test::expect_applied(reference.step());
    EXPECT_TRUE(sgd.step().applied);
    const auto expected = weights_of(plain), got = weights_of(tower);
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-5);
  }
}

TEST(DdpOrders, ASumCountsEachBackwardOnce) {
  for (const int world : {2, 3}) {
    for (const bool find_unused : {false, true})
      run_threads(world, [&](ProcessGroup& group) { check_sums(group, find_unused); });
  }
}

/// No backward reduces: the step does, whatever each rank's loss has reached. What none reached
/// does not move, in spite of its momentum.
TEST(DdpOrders, AStepAveragesGradientsThatOtherRanksDoNotHave) {
  const unsigned reach[3][3] = {{1, 2, 1}, {4, 4, 4}, {2, 1, 5}};  // by step and rank
  for (const int world : {2, 3}) {
    run_threads(world, [&](ProcessGroup& group) {
      Tower plain(3), tower(3);
      const optim::SgdOptions options{.lr = 0.1, .momentum = 0.9};
      optim::FusedSGD reference(plain.parameters(), options), sgd(tower.parameters(), options);
      DistributedDataParallel ddp(tower, group, {.find_unused_parameters = true});
      for (std::uint64_t step = 0; step < 3; ++step) {
        for (std::uint64_t rank = 0; rank < static_cast<std::uint64_t>(world); ++rank) {
          plain.reach = reach[step][rank];
          autograd::backward(loss_of(plain, 10 * step + rank));
        }
        test::expect_applied(reference.step({.gradient_scale = 1.0 / world}));
        tower.reach = reach[step][rank_of(group)];
        const auto guard = ddp.no_sync();
        autograd::backward(loss_of(ddp, 10 * step + rank_of(group)));
        EXPECT_TRUE(sgd.step().applied);
        const auto expected = weights_of(plain), got = weights_of(tower);
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-6);
      }
    });
  }
}

/// A rank with nothing to add to would keep half gradients where the others' turn to f32.
TEST(DdpOrders, GradientsTurnToF32OnAllRanks) {
  for (const bool step_reduces : {false, true}) {
    run_threads(2, [&](ProcessGroup& group) {
      Tower tower(2);
      tower.to(DType::bf16);
      Tensor elsewhere = normal({1}, 3);
      elsewhere.set_requires_grad(true);
      optim::FusedSGD sgd(tower.parameters(), {.lr = 0.1});
      DistributedDataParallel ddp(tower, group, {.find_unused_parameters = true});
      {
        const auto guard = ddp.no_sync();
        autograd::backward(autograd::sum(elsewhere));
        if (group.rank() == 0) autograd::backward(loss_of(ddp, 1, DType::bf16));
      }
      const auto guard = ddp.no_sync(step_reduces);
      tower.reach = group.rank() == 0 ? 1 : 2;
      autograd::backward(loss_of(ddp, 2, DType::bf16));
      EXPECT_TRUE(sgd.step().applied);
      const std::string own = testing::PrintToString(weights_of(tower));
      EXPECT_EQ(group.exchange(own, "weights"), std::vector(2, own));
      EXPECT_TRUE(optim::GradientArena::of(tower.parameters()[0].tensor)->f32_slots());
    });
  }
}

/// A frozen parameter is not added to: what it holds decides nothing.
TEST(DdpOrders, AFrozenGradientTurnsNoneToF32) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(2);
    tower.to(DType::bf16);
    DistributedDataParallel ddp(tower, group, {.find_unused_parameters = true});
    tower.reach = group.rank() == 0 ? 2 : 3;
    {
      const auto guard = ddp.no_sync();
      autograd::backward(loss_of(ddp, 1, DType::bf16));
    }
    for (const auto& [name, tensor] : tower.layer(1).parameters())
      Tensor(tensor).set_requires_grad(false);
    if (group.rank() == 1) tower.layer(0).clear_grad();
    tower.reach = 1;
    autograd::backward(loss_of(ddp, 2, DType::bf16));
    EXPECT_FALSE(optim::GradientArena::of(tower.parameters()[0].tensor)->f32_slots());
  });
}

TEST(DdpOrders, AStepWhoseRanksHaveGradientsOfOtherParametersSaysSo) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(2);
    optim::FusedSGD sgd(tower.parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(tower, group);
    tower.reach = group.rank() == 0 ? 1 : 2;
    {
      const auto guard = ddp.no_sync();
      autograd::backward(loss_of(ddp, 0));
    }
    expect_error<InvalidArgument>(
        [&] { (void)sgd.step(); },
        {"'l0.weight', 'l0.bias' on rank 0 and 'l1.weight', 'l1.bias' on rank 1", "no no_sync",
         "find_unused_parameters"});
    tower.clear_grad();  // nothing else is lost
    tower.reach = 3;
    autograd::backward(loss_of(ddp, rank_of(group)));
    EXPECT_TRUE(sgd.step().applied);
    group.barrier();
  });
}

/// Multiplies by 1; its backward throws.
struct Failing {
  static constexpr autograd::OpInfo kInfo{"failing"};
  Tensor forward(autograd::Context& /*context*/, const Tensor& x) const {
    Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  autograd::Tensors backward(autograd::Context& /*context*/, const Tensor& /*dy*/) const {
    core::fail<core::OutOfMemory>("failing", "expected memory, got none");
  }
};

/// The first layer's backward, which comes last, throws.
Tensor failing_loss(Tower& tower) {
  const Tensor weight = autograd::apply(Failing{}, tower.parameters()[0].tensor);
  const Tensor first = autograd::linear(normal({2, test::kWidth}, 1), weight);
  return autograd::mean(tower.layer(1).forward(first));
}

/// Nothing was reduced yet: no rank waits, and the group lives.
TEST(DdpOrders, WhatOneRankLostAStepRefusesOnAll) {
  for (const bool find_unused : {false, true}) {
    run_threads(2, [&](ProcessGroup& group) {
      Tower tower(2);
      optim::FusedSGD sgd(tower.parameters(), {.lr = 0.1});
      DistributedDataParallel ddp(tower, group, {.find_unused_parameters = find_unused});
      for (const bool broken : {false, true}) {
        const auto guard = ddp.no_sync();
        if (broken) autograd::backward(loss_of(ddp, rank_of(group)));  // the slots hold something
        if (group.rank() == 0) autograd::backward(loss_of(ddp, 0));
        if (group.rank() == 1)
          expect_error<core::OutOfMemory>([&] { autograd::backward(failing_loss(tower)); }, {});
        const auto step = [&] { (void)sgd.step(); };
        const char* which = group.rank() == 1 ? "[gradient]" : "on rank 1";
        expect_error<core::Error>(step, {"'l", which, "clear_grad()"});
        tower.clear_grad();
      }
      autograd::backward(loss_of(ddp, rank_of(group)));
      EXPECT_TRUE(sgd.step().applied);
      group.barrier();
    });
  }
}

/// Some buckets were reduced: the others cannot go on, and need not wait for their timeout to know
/// it.
TEST(DdpOrders, ARankThatBreaksOffAloneIsNamedAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  run_threads(3, [](ProcessGroup& group) {
    Tower tower(2);
    DistributedDataParallel ddp(tower, group, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    autograd::backward(loss_of(ddp, rank_of(group)));  // the order is known
    tower.clear_grad();
    if (group.rank() == 1) {
      expect_error<core::OutOfMemory>([&] { autograd::backward(failing_loss(tower)); }, {});
      wait_until_broken(group);
    } else {
      const auto step = [&] {
        autograd::backward(loss_of(ddp, 0));
        group.wait();  // a GPU goes on alone until here
      };
      expect_error<CommunicationError>(step, {"rank 1 gave up", "expected memory, got none"});
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(9));
}

/// All break off after the same bucket: none waits for another.
TEST(DdpOrders, RanksThatAllBreakOffGoOn) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(2);
    DistributedDataParallel ddp(tower, group, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    for (int round = 0; round < 2; ++round) {
      expect_error<core::OutOfMemory>([&] { autograd::backward(failing_loss(tower)); }, {});
      if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
      tower.clear_grad();
      autograd::backward(loss_of(ddp, rank_of(group)));
      tower.clear_grad();
    }
    group.barrier();
  });
}

/// Ranks meet leaves in orders of their own: what a run does before one refuses must not depend on
/// it.
TEST(DdpOrders, ARunThatCannotBeginHasLaidOutAllMemory) {
  Tower a(1, 1), b(1, 2);
  a.to(DType::bf16);
  b.to(DType::bf16);
  optim::FusedSGD sgd_a(a.parameters(), {.lr = 0.1}), sgd_b(b.parameters(), {.lr = 0.1});
  const auto loss = [&] {
    return autograd::add(loss_of(a, 1, DType::bf16), loss_of(b, 2, DType::bf16));
  };
  autograd::backward(loss());
  expect_error<InvalidArgument>(
      [&] {
        autograd::backward(loss(), {}, {.scale = {core::next_scaler_id(), 4.0}});
      },
      {"got a loss scaled by 4"});
  for (const Tower* tower : {&a, &b}) {
    EXPECT_TRUE(optim::GradientArena::of(tower->parameters()[0].tensor)->f32_slots());
  }
}

/// A loss of another scale, where only one rank's reaches what still has a gradient to step.
TEST(DdpOrders, ABackwardThatOneRankRefusesEndsOnAll) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(2);
    optim::FusedSGD sgd(tower.parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(tower, group, {.find_unused_parameters = true});
    tower.reach = 1;
    autograd::backward(loss_of(ddp, 0));
    tower.reach = group.rank() == 0 ? 1 : 2;
    const core::GradientScale scale{core::next_scaler_id(), 4.0};
    expect_error<core::Error>([&] { autograd::backward(loss_of(ddp, 0), {}, {.scale = scale}); },
                              {"that nobody scaled", "'l0.", "clear_grad()"});
    wait_until_broken(group);
  });
}

/// The optimizer's own parameters have a gradient on one rank only, and one that it may not step.
TEST(DdpOrders, AStepThatOneRankRefusesEndsOnAll) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(2);
    optim::FusedSGD sgd(tower.layer(0).parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(tower, group, {.find_unused_parameters = true});
    tower.reach = group.rank() == 0 ? 1 : 2;
    {
      const auto guard = ddp.no_sync();
      const core::GradientScale scale{core::next_scaler_id(), 4.0};
      autograd::backward(loss_of(ddp, 0), {}, {.scale = scale});
    }
    expect_error<InvalidArgument>([&] { (void)sgd.step(); },
                                  {"gradients that nobody scaled", "'weight'"});
    tower.clear_grad();
    tower.reach = 3;
    autograd::backward(loss_of(ddp, 0));
    EXPECT_TRUE(sgd.step().applied);
    group.barrier();
  });
}

TEST(DdpOrders, AnAddedParameterNeedsAForwardOfDdp) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(1);
    DistributedDataParallel ddp(tower, group);
    autograd::backward(loss_of(ddp, rank_of(group)));
    tower.clear_grad();
    manual_seed(50 + rank_of(group));
    tower.add_layer();
    ddp(normal({1, test::kWidth}, 1));
    const auto weights = tower.layer(1).parameters()[0].tensor.to_vector<float>();
    const std::string text(reinterpret_cast<const char*>(weights.data()), weights.size() * 4);
    for (const std::string& other : group.exchange(text, "weights")) EXPECT_TRUE(other == text);
    tower.add_layer();
    expect_error<core::Error>([&] { autograd::backward(loss_of(tower, 0)); },
                              {"ddp(x)", "'l2.weight'"});
  });
}

TEST(DdpOrders, AResumedRunReducesInTheSameOrder) {
  run_threads(2, [](ProcessGroup& group) {
    const DistributedOptions each{.first_bucket_bytes = 1, .bucket_bytes = 1};
    const auto order = [](const DistributedDataParallel& ddp) {
      std::vector<std::string> names;
      for (const auto& bucket : ddp.buckets()) names.push_back(bucket.parameters.at(0));
      return names;
    };
    Tower tower(3), other(3);
    DistributedDataParallel ddp(tower, group, each), resumed(other, group, each);
    const auto planned = order(ddp);
    autograd::backward(loss_of(ddp, rank_of(group)));
    EXPECT_NE(order(ddp), planned);  // a layer's weight is ready before its bias
    resumed.load_state_dict(ddp.state_dict());
    EXPECT_EQ(order(resumed), order(ddp));
    autograd::backward(loss_of(resumed, rank_of(group)));
    EXPECT_EQ(order(resumed), order(ddp));
    EXPECT_TRUE(bytes_of(gradients_of(other)) == bytes_of(gradients_of(tower)));
  });
}

TEST(DdpOrders, AJoinThatEndsEarlyOrTwiceIsAnError) {
  run_threads(2, [](ProcessGroup& group) {
    Tower tower(1);
    DistributedDataParallel ddp(tower, group);
    auto join = ddp.join(DivideBy::samples);
    expect_error<InvalidArgument>([&] { (void)ddp.join(); }, {"one join() at a time"});
    expect_error<InvalidArgument>([&] { join.samples(0); }, {"above 0"});
    EXPECT_FALSE(join.other_ranks_have_batches());
    EXPECT_FALSE(join.other_ranks_have_batches());
    expect_error<InvalidArgument>([&] { autograd::backward(loss_of(ddp, 0)); },
                                  {"no backward after other_ranks_have_batches()"});
  });
}

}  // namespace
}  // namespace cairn::parallel
