// Captured steps over two ranks: the bits of uncaptured ones. NCCL's collectives are in the graphs.
#include <gmock/gmock.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cairn/amp/captured_step.h"
#include "cairn/autograd/autograd.h"
#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optim.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "ddp_support.h"
#include "ranks.h"
#include "support/expect_error.h"
#include "support/tensors.h"
#ifdef CAIRN_SIMULATED_GPUS
#include "gpu/sim/simulator.h"
#endif

namespace cairn::parallel {
namespace {

using core::CommunicationError;

const bool kConfigured = setenv("CAIRN_SIM_GPUS", "2", 0) == 0;  // before the first call

bool two_gpus() {
  return core::device_count(core::DeviceType::cuda) >= 2;
}

constexpr double kInf = std::numeric_limits<double>::infinity();

/// A rank's training with a GPU of its own.
struct Training {
  using MakeModel = std::function<nn::Sequential()>;
  Training(const ProcessGroup& group, const DistributedOptions& options,
           const MakeModel& make = make_model)
      : rank(group.rank()),
        on_gpu({core::DeviceType::cuda, group.rank()}),
        model(make()),
        optimizer(model.parameters(), {.lr = 1e-2}),
        ddp(model, group, options),
        precision(amp::initialize(model, optimizer,
                                  {.opt_level = amp::OptLevel::O2,
                                   .half_dtype = DType::f16,
                                   .dynamic_loss_scale = true,
                                   .scaler = {.init_scale = 1024, .growth_interval = 3},
                                   .world = ddp.world()})) {
    manual_seed(100 + static_cast<std::uint64_t>(rank));  // of dropout
  }
  static nn::Sequential make_model() {
    manual_seed(3);
    return nn::Sequential(nn::Linear(8, 32), nn::ReLU(), nn::Dropout(0.25), nn::Linear(32, 33),
                          nn::Linear(33, 4));
  }

  Tensor loss(const Tensor& x, const Tensor& factor) {
    const Tensor y = autograd::to(ddp(precision.cast(x)), DType::f32);
    return autograd::mul(autograd::mse_loss(y, Tensor::zeros(y.shape(), DType::f32, y.device())),
                         factor);
  }
  amp::CapturedStep captured() {
    return {precision, [this](const Tensor& x, const Tensor& factor) { return loss(x, factor); }};
  }
  Tensor batch(int k, std::int64_t rows = 6) const {
    return on_device(test::normal_tensor({rows, 8}, static_cast<std::uint64_t>(2 * k + rank)));
  }
  /// Infinity makes a loss overflow.
  Tensor factor(bool overflows) const {
    return on_device(Tensor::full({1}, overflows ? kInf : 1.0, DType::f32, Device{}));
  }
  static Tensor on_device(const Tensor& x) {
    const Tensor y = Tensor::empty(x.shape(), x.dtype(), core::default_device());
    core::copy_bytes(x, y);
    return y;
  }
  std::vector<double> state() {
    std::vector<double> all = test::weights_of(model);
    all.push_back(precision.loss_scale());
    all.push_back(static_cast<double>(optimizer.steps()));
    return all;
  }

  int rank;
  core::DefaultDeviceGuard on_gpu;
  nn::Sequential model;
  optim::FusedAdam optimizer;
  DistributedDataParallel ddp;
  amp::Amp precision;
};

const DistributedOptions kSmallBuckets{.first_bucket_bytes = 200, .bucket_bytes = 1000};

/// Twelve steps, of which one overflows on one rank, and one has fewer rows there.
std::vector<double> train(const ProcessGroup& group, const DistributedOptions& options,
                          bool captures, const Training::MakeModel& make = Training::make_model) {
  Training training(group, options, make);
  std::optional<amp::CapturedStep> step;
  if (captures) step.emplace(training.captured());
  for (int k = 0; k < 12; ++k) {
    const bool own = training.rank == 1;
    const Tensor x = training.batch(k, own && k == 9 ? 5 : 6);
    const Tensor factor = training.factor(own && k == 6);
    if (step) {
      (*step)(x, factor);
    } else {
      training.precision.backward(training.loss(x, factor));
      EXPECT_EQ(training.precision.step().applied, k != 6);
    }
  }
  EXPECT_TRUE(!step || step->captured());
  return training.state();
}

void check_bits(const ProcessGroup& group, const DistributedOptions& options = kSmallBuckets) {
  EXPECT_EQ(train(group, options, false), train(group, options, true)) << "rank " << group.rank();
}

TEST(NcclCaptured, StepsHaveTheBitsOfUncapturedOnesInThreads) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) { check_bits(group); });
}

TEST(NcclCaptured, StepsHaveTheBitsOfUncapturedOnesInProcesses) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_ranks(2, [](ProcessGroup& group) { check_bits(group); });
}

TEST(NcclCaptured, BucketsMayTravelInF32OverSeveralStreams) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    DistributedOptions options = kSmallBuckets;
    options.allreduce_always_fp32 = true;
    options.num_allreduce_streams = 2;
    check_bits(group, options);
    options.delay_allreduce = true;
    options.num_allreduce_streams = 1;
    check_bits(group, options);
  });
}

TEST(NcclCaptured, BatchNormsMayBeSynchronised) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    const auto make = [&] {
      manual_seed(3);
      nn::Sequential model(nn::Linear(8, 32), nn::BatchNorm1d(32), nn::ReLU(), nn::Linear(32, 4));
      convert_sync_batch_norm(model, group);
      return model;
    };
    EXPECT_EQ(train(group, kSmallBuckets, false, make), train(group, kSmallBuckets, true, make));
  });
}

#ifdef CAIRN_SIMULATED_GPUS
TEST(NcclCaptured, AReplayIsOneLaunchThatNobodyWaitsFor) {
  test::run_ranks(2, [](ProcessGroup& group) {
    Training training(group, kSmallBuckets);
    amp::CapturedStep step = training.captured();
    for (int k = 0; k < 4; ++k) step(training.batch(k), training.factor(false));
    ASSERT_TRUE(step.captured());
    const Tensor x = training.batch(4), factor = training.factor(false);
    const auto before = gpusim::counters();
    for (int k = 0; k < 3; ++k) step(x, factor);
    auto after = gpusim::counters();
    EXPECT_EQ(after.waits, before.waits);
    EXPECT_EQ(after.calls["cudaGraphLaunch"], before.calls.at("cudaGraphLaunch") + 3);
    EXPECT_EQ(after.calls["ncclAllReduce"], before.calls.at("ncclAllReduce"));
  });
}
#endif

// ---- What the host would have to do each time

template <class F>
void expect_unsupported(const F& f, const std::string& text) {
  test::expect_error<core::Unsupported>(f, {text});
}

TEST(NcclCaptured, ExchangesOfTheHostAreRefusedAndChangeNothing) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    DistributedOptions options = kSmallBuckets;
    options.find_unused_parameters = true;
    Training training(group, options);
    amp::CapturedStep step = training.captured();
    for (int k = 0; k < 2; ++k) step(training.batch(k), training.factor(false));
    expect_unsupported([&] { step(training.batch(2), training.factor(false)); },
                       "got an exchange between ranks by the host, exchange 'which parameters "
                       "losses reach");
    group.barrier("the group goes on");
    EXPECT_FALSE(step.captured());
  });
}

/// A replay would leave it out, and the other ranks' too: each is refused by its name.
TEST(NcclCaptured, WhatPassesThroughTheHostIsRefusedByName) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    const Device device{core::DeviceType::cuda, group.rank()};
    const Tensor x = Tensor::full({10}, 1.0, DType::f32, Device{});
    core::Graph graph(device);
    const auto expect_refused = [&](const std::function<void()>& work, const char* text) {
      graph.warm_up(work);
      expect_unsupported([&] { graph.capture(work); }, text);
    };
    const std::string host = "got a collective of the host's tensors, ";
    expect_refused([&] { group.all_reduce(x, ReduceOp::sum, "metric"); },
                   (host + "all_reduce sum f32[10] 'metric'").c_str());
    expect_refused([&] { group.broadcast(x, 0, "x"); }, (host + "broadcast from 0").c_str());
    const std::string by_host = "got an exchange between ranks by the host, ";
    expect_refused([&] { group.barrier("b"); }, (by_host + "barrier 'b'").c_str());
    expect_refused([&] { group.exchange("v", "e"); }, (by_host + "exchange 'e'").c_str());
    expect_refused([&] { group.all_reduce_sum(1.0, "s"); }, (by_host + "exchange 's'").c_str());
    expect_refused([&] { group.split(0, 0, "halves"); }, (by_host + "split 'halves'").c_str());
    expect_refused([&] { group.split(0, 0).barrier("of a part"); }, (by_host + "split").c_str());
    group.wait();
    EXPECT_EQ(x.to_vector(), std::vector<double>(10, 2.0));
  });
}

/// Two steps run; the third, which is recorded, is refused.
void expect_not_recorded(Training& training, const std::string& text) {
  amp::CapturedStep step = training.captured();
  for (int k = 0; k < 2; ++k) step(training.batch(k), training.factor(false));
  expect_unsupported([&] { step(training.batch(2), training.factor(false)); }, text);
}

/// A step that reduces what no_sync left behind compares what ranks hold.
TEST(NcclCaptured, AStepThatReducesWhatBackwardsLeftIsRefused) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    Training training(group, kSmallBuckets);
    const auto no_sync = training.ddp.no_sync();
    expect_not_recorded(training, "got an exchange between ranks by the host, ");
    group.barrier("the group goes on");
  });
}

/// The ranks tell each other who has run out of batches.
TEST(NcclCaptured, UnevenInputsAreRefused) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    Training training(group, kSmallBuckets);
    {
      auto join = training.ddp.join();
      expect_not_recorded(training, "got an exchange between ranks by the host, exchange 'join'");
    }
    group.barrier("the group goes on");
  });
}

/// A backward that fails before anything is reduced, while it is recorded.
TEST(NcclCaptured, ABackwardThatNeedsTheHostIsRefusedAndTheGroupGoesOn) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    Training training(group, {});  // one bucket
    bool reads = true;
    const Tensor last = training.model.parameters().back().tensor;
    const Tensor host = Tensor::empty(last.shape(), last.dtype(), Device{});
    const auto hook = autograd::on_gradient_ready(last, [&](const Tensor& leaf) {
      if (reads && core::capturing()) kernels::copy(leaf, host);
    });
    amp::CapturedStep step = training.captured();
    const auto run = [&](int k) { step(training.batch(k), training.factor(false)); };
    for (int k = 0; k < 2; ++k) run(k);
    expect_unsupported([&] { run(2); }, "got a copy between the host and a GPU");
    reads = false;
    for (int k = 2; k < 6; ++k) run(k);
    EXPECT_TRUE(step.captured());
    group.wait();
  });
}

TEST(NcclCaptured, ACollectiveThatNoWarmUpHasCalledIsRefused) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    const Device device{core::DeviceType::cuda, group.rank()};
    const Tensor x = Tensor::full({10}, 1.0, DType::f32, device);
    core::Graph graph(device);
    const auto reduce = [&] { group.all_reduce(x, ReduceOp::sum, "x"); };
    expect_unsupported([&] { graph.capture(reduce); }, "got a collective that no warm-up");
    graph.warm_up(reduce);
    graph.capture(reduce);
    graph.replay();
    expect_unsupported([&] { graph.capture([&] { group.send(x, 1 - group.rank(), 1, "x"); }); },
                       "got a message between two ranks");
    group.wait();
    EXPECT_EQ(x.to_vector(), std::vector<double>(10, 4.0));
  });
}

TEST(NcclCaptured, RanksWhoseGradientsNobodyAveragesAreRefused) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  test::run_threads(2, [](ProcessGroup& group) {
    const core::DefaultDeviceGuard device({core::DeviceType::cuda, group.rank()});
    nn::Sequential model = Training::make_model();
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
    amp::Amp precision =
        amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2, .world = group.world()});
    expect_unsupported([&] { precision.set_capturable(true); },
                       "got 2 ranks whose backwards do not average gradients");
  });
}

// ---- Failures

/// The other rank does not come to a replay: it is named, and the half of an average that the
/// aborted collective leaves goes into no weight.
TEST(NcclCaptured, AReplayThatDoesNotEndIsNamed) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  const auto results = test::start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(
        {.timeout = std::chrono::seconds(2), .heartbeat_timeout = std::chrono::seconds(2)});
    Training training(group, kSmallBuckets);
    amp::CapturedStep step = training.captured();
    for (int k = 0; k < 5; ++k) step(training.batch(k), training.factor(false));
    group.wait();
    if (rank == 1) return test::wait_until_broken(group);
    const std::vector<double> before = test::weights_of(training.model);
    step(training.batch(5), training.factor(false));
    test::expect_error<CommunicationError>(
        [&] { group.wait(); }, {"rank 1 did not come to collective", "all_reduce mean f16"});
    test::expect_error<CommunicationError>([&] { step(training.batch(6), training.factor(false)); },
                                           {"all_reduce mean f16"});
    EXPECT_EQ(test::weights_of(training.model), before);
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

}  // namespace
}  // namespace cairn::parallel
