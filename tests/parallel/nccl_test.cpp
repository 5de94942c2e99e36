// Groups whose tensors are on GPUs: NCCL's results against the CPU's, and what its failures end in.
// Needs two GPUs; simulated ones can also be told to fail.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/core/stream.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optimizer.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "group/group_impl.h"
#include "ranks.h"
#include "support/expect_error.h"
#include "support/free_port.h"
#include "support/step.h"
#include "support/tensors.h"
#ifdef CAIRN_SIMULATED_GPUS
#include "gpu/sim/machine.h"
#include "gpu/sim/simulator.h"
#endif

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using test::expect_error;
using test::fast_options;
using test::start_ranks;
using Clock = std::chrono::steady_clock;

const bool kConfigured = setenv("CAIRN_SIM_GPUS", "2", 0) == 0;  // before the first call

bool two_gpus() {
  return core::device_count(core::DeviceType::cuda) >= 2;
}

Device gpu(const ProcessGroup& group) {
  return {core::DeviceType::cuda, group.rank()};
}

Tensor on(Device device, const Tensor& x) {
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), device);
  core::copy_bytes(x, y);
  core::Stream::current(device.is_cuda() ? device : x.device()).synchronize();  // x may end
  return y;
}

using Body = std::function<void(ProcessGroup&)>;

/// Two processes, each with a GPU; both must succeed.
void run_processes(const Body& body) {
  const auto results = start_ranks(2, [&](int) {
    auto group = ProcessGroup::from_environment(fast_options());
    body(group);
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, 0) << "rank " << rank << ":\n" << results[rank].output;
  }
}

void in_two_threads(const std::function<void(int rank)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Two threads of this process, as ranks of an in-process group; then as ranks that meet in a
/// store, as processes do.
void run_as_threads(const Body& body) {
  {
    SCOPED_TRACE("in process");
    auto groups = ProcessGroup::in_process(2, fast_options());
    in_two_threads([&](int rank) { body(groups[static_cast<std::size_t>(rank)]); });
  }
  SCOPED_TRACE("in a store");
  const int port = test::free_port();
  in_two_threads([&](int rank) {
    JobEnvironment job{rank, 2, rank, 2, "127.0.0.1", port, "0123456789abcdef0123456789abcdef"};
    const auto join = [&](OnFailure on_failure, CheckDevices check) {
      return join_processes(job, fast_options(), std::move(on_failure), std::move(check));
    };
    ProcessGroup group(std::make_shared<ProcessGroup::Impl>(job, fast_options(), join));
    body(group);
  });
}

// ---- Results

constexpr std::int64_t kCounts[] = {1, 1000, 40'003};

Tensor contribution(int rank, std::int64_t n, DType dtype, Device device) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i)
    values.push_back(std::floor(8 * std::sin(static_cast<double>(i) + rank)) + 9);
  return on(device, Tensor::from(values, {n}, dtype));
}

/// Every collective on the GPU and, by Gloo, on the CPU: small integers, so that no order of adding
/// shows.
void check_collectives(ProcessGroup& group) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i32}) {
    for (const std::int64_t n : kCounts) {
      std::vector<std::vector<double>> results;
      for (const Device device : {gpu(group), Device{}}) {
        const Tensor x = contribution(group.rank(), n, dtype, device);
        const Tensor all = Tensor::zeros({2, n}, dtype, device);
        const Tensor part = Tensor::zeros({n}, dtype, device);
        group.all_gather(x, all, "gathered");
        group.reduce_scatter(all, part, ReduceOp::sum, "scattered");
        group.all_reduce(x, ReduceOp::sum, "summed");
        group.all_reduce(part, core::is_floating(dtype) ? ReduceOp::mean : ReduceOp::max, "mean");
        group.broadcast(all, 1, "shared");
        group.wait();
        std::vector<double> values;
        for (const Tensor& tensor : {x, all, part}) {
          const auto v = tensor.to_vector();
          values.insert(values.end(), v.begin(), v.end());
        }
        results.push_back(std::move(values));
      }
      EXPECT_TRUE(results[0] == results[1]) << dtype << " " << n;
    }
  }
}

TEST(Nccl, ResultsAreTheCpusInProcesses) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_processes(check_collectives);
}
TEST(Nccl, ResultsAreTheCpusInThreads) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_as_threads(check_collectives);
}

// The simulator names collectives of two communicators that no stream orders.
TEST(Nccl, AsyncFollowsWhatAnotherGroupHasInTheCurrentStream) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_as_threads([](ProcessGroup& group) {
    const ProcessGroup part = group.split(0);
    const Tensor x = on(gpu(group), Tensor::full({100}, 1.0)), y = on(gpu(group), x);
    for (int k = 0; k < 3; ++k) {
      part.all_reduce(y, ReduceOp::sum, "y");
      const Work work = group.async(x.device(), [&] { group.all_reduce(x, ReduceOp::sum, "x"); });
      work.wait();
    }
    EXPECT_EQ(x.to_vector(), std::vector<double>(100, 8.0));
    EXPECT_EQ(y.to_vector(), std::vector<double>(100, 8.0));
  });
}

#ifdef CAIRN_SIMULATED_GPUS
TEST(Nccl, APartOfAConnectedGroupNeedsNoNewRendezvous) {
  run_as_threads([](ProcessGroup& group) {
    const Tensor x = on(gpu(group), Tensor::full({100}, 1.0));
    group.all_reduce(x, ReduceOp::sum, "connect");
    const auto before = gpusim::counters().calls["ncclCommInitRankScalable"];
    const ProcessGroup part = group.split(0, -group.rank());
    part.all_reduce(x, ReduceOp::sum, "x");
    part.wait();
    EXPECT_EQ(x.to_vector(), std::vector<double>(100, 4.0));
    group.barrier("both have");
    EXPECT_EQ(gpusim::counters().calls["ncclCommInitRankScalable"], before);
  });
}
#endif

/// Rank 1 ends its group so much later than rank 0, with three collectives under way.
void end_groups(std::chrono::milliseconds later) {
  run_as_threads([later](ProcessGroup& group) {
    const Tensor x = on(gpu(group), Tensor::full({100'000}, 1.0));
    for (int i = 0; i < 3; ++i) group.all_reduce(x, ReduceOp::sum, "x");
    if (group.rank() == 1) std::this_thread::sleep_for(later);
    group = ProcessGroup::single();
    EXPECT_EQ(x.to_vector(), std::vector<double>(100'000, 8.0));
  });
}

TEST(Nccl, AGroupThatEndsDoesFirstWhatIsUnderWay) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  end_groups(std::chrono::milliseconds(0));
}
TEST(Nccl, ARankMayEndItsGroupLater) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  end_groups(std::chrono::milliseconds(700));
}

// ---- Training

nn::Sequential make_model(Device device) {
  manual_seed(7);
  nn::Sequential model(nn::Linear(20, 33), nn::ReLU(), nn::Linear(33, 17), nn::Tanh(),
                       nn::Linear(17, 4));
  model.to(device);
  return model;
}

Tensor random(const Shape& shape, std::uint64_t seed, Device device) {
  return on(device, test::normal_tensor(shape, seed));
}

template <class Model>
void backward(Model& model, int rank, Device device) {
  const auto seed = static_cast<std::uint64_t>(rank);
  const Tensor y = model(random({6, 20}, 1000 + seed, device));
  autograd::backward(autograd::mse_loss(y, random({6, 4}, 2000 + seed, device)));
}

std::vector<double> weights(const nn::Module& model) {
  std::vector<double> all;
  for (const auto& [name, tensor] : model.parameters()) {
    const auto values = tensor.to_vector();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

/// Three steps with small buckets.
std::vector<double> train(ProcessGroup& group, Device device) {
  nn::Sequential model = make_model(device);
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  DistributedDataParallel ddp(model, group, {.first_bucket_bytes = 200, .bucket_bytes = 3000});
  for (int step = 0; step < 3; ++step) {
    backward(ddp, group.rank(), device);
    test::expect_applied(optimizer.step());
  }
  return weights(model);
}

void nccl_check_training(ProcessGroup& group) {
  const auto on_gpu = train(group, gpu(group)), on_cpu = train(group, Device{});
  ASSERT_EQ(on_gpu.size(), on_cpu.size());
  for (std::size_t i = 0; i < on_gpu.size(); ++i) ASSERT_NEAR(on_gpu[i], on_cpu[i], 1e-5) << i;
}

TEST(Nccl, TrainsAsTheCpuInProcesses) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_processes(nccl_check_training);
}
TEST(Nccl, TrainsAsTheCpuInThreads) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_as_threads(nccl_check_training);
}

// ---- Messages

constexpr std::uint64_t kTag = 6;

/// x goes there and back: what comes after it under the same tag is the devices' alone.
Tensor ping_pong(ProcessGroup& group) {
  const Tensor x = on(gpu(group), Tensor::zeros({4}));
  group.all_reduce(x, ReduceOp::sum, "connect");
  if (group.rank() == 0) group.send(x, 1, kTag, "x");
  group.recv(x, 1 - group.rank(), kTag, "x");
  if (group.rank() == 1) group.send(x, 0, kTag, "x");
  group.wait();
  return x;
}

/// The device waits for a message; its host has gone on.
void expect_no_message(ProcessGroup& group, const Tensor& x,
                       std::initializer_list<std::string> texts) {
  const auto start = Clock::now();
  group.recv(x, 1 - group.rank(), kTag, "x");
  expect_error<CommunicationError>([&] { group.wait(); }, texts);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
}

TEST(Nccl, AMessageOfAnotherTagBreaksTheGroup) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_as_threads([](ProcessGroup& group) {
    const Tensor x = ping_pong(group);
    const auto send = [&] { group.send(x, 1, 3, "x"), group.wait(); };
    const auto receive = [&] { group.recv(x, 0, 4, "x"); };
    const auto texts = {
        std::string("rank 1 expected 16 bytes of f32 with tag 4 from rank 0, which "
                    "sent 16 bytes of f32 with tag 3")};
    if (group.rank() == 1) return expect_error<CommunicationError>(receive, texts);
    try {
      send();
    } catch (const CommunicationError&) {  // where it has not ended before
    }
    test::wait_until_broken(group);
    expect_error<CommunicationError>([&] { group.barrier("later"); }, texts);
  });
}

TEST(Nccl, DevicesThatWaitForEachOthersMessagesAreNamed) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_as_threads([](ProcessGroup& group) {
    expect_no_message(
        group, ping_pong(group),
        {"ranks wait for each other: rank 0 is in recv from 1 tag 6 f32[4] 'x'; rank 1 "
         "is in recv from 0 tag 6 f32[4] 'x'"});
  });
}

TEST(Nccl, ARankThatLeavesInsteadOfSendingIsNamed) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  run_as_threads([](ProcessGroup& group) {
    const Tensor x = ping_pong(group);
    if (group.rank() == 0)
      expect_no_message(group, x,
                        {"rank 1 left the group after 1 collectives, but rank 0 is in recv "
                         "from 1 tag 6 f32[4] 'x'"});
    group = ProcessGroup::single();
  });
}

TEST(Nccl, ARankThatDoesNotSendIsNamedAtTheLimit) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(
        {.timeout = std::chrono::seconds(2), .heartbeat_timeout = std::chrono::seconds(2)});
    const Tensor x = ping_pong(group);
    if (rank == 1) return test::wait_until_broken(group);
    expect_no_message(group, x,
                      {"rank 0 has waited 2",
                       " s in recv from 1 tag 6 f32[4] 'x'; rank 1 "
                       "is in none, after 1 collectives (the limit is 2 s)"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

// ---- Failures

TEST(Nccl, AKilledRankIsNamedInTraining) {
  if (!two_gpus()) GTEST_SKIP() << "needs two GPUs";
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(fast_options());
    const Device device = gpu(group);
    nn::Sequential model = make_model(device);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(model, group);
    const auto train = [&] {
      for (int step = 0; step < 1'000'000; ++step) {
        if (rank == 1 && step == 5) raise(SIGKILL);
        backward(ddp, rank, device);
        test::expect_applied(optimizer.step());
      }
    };
    expect_error<CommunicationError>(train, {"rank 1 died", "all_reduce mean f32"});
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, rank == 1 ? 128 + SIGKILL : 0) << results[rank].output;
    EXPECT_LT(results[rank].seconds, 12.0);
  }
}

#ifdef CAIRN_SIMULATED_GPUS

constexpr int kRemoteError = 6;  // ncclRemoteError

/// The device does nothing more that comes after what is queued now; the host goes on.
void get_stuck(Device device) {
  const core::DeviceGuard guard(device);
  const gpusim::Call call("stuck");
  gpusim::Stream* const stream = gpusim::find_stream(core::Stream::current(device).native());
  gpusim::enqueue(*stream, {"stuck", [] {}, [] { return false; }});
}

/// A rank whose device is stuck cannot end as others do: its streams would be waited for.
[[noreturn]] void leave_at_once() {
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

struct Training {
  explicit Training(ProcessGroup& g)
      : group(g),
        device(gpu(g)),
        model(make_model(device)),
        x(random({6, 20}, 1, device)),
        y(random({6, 4}, 2, device)),
        optimizer(model.parameters(), {.lr = 0.1}),
        ddp(std::make_unique<DistributedDataParallel>(model, group)) {
    for (int step = 0; step < 2;
         ++step) {  // then all collectives have been called before: no host waits in them
      backward();
      test::expect_applied(optimizer.step());
    }
    before = weights(model);
    group.barrier("the first step");
  }
  void backward() { autograd::backward(autograd::mse_loss((*ddp)(x), y)); }

  /// The device gets stuck half-way, before any reduction.
  void backward_on_stuck_device() {
    const auto hook = autograd::on_gradient_ready(model.parameters().back().tensor,
                                                  [this](const Tensor&) { get_stuck(device); });
    backward();
  }

  ProcessGroup& group;
  Device device;
  nn::Sequential model;
  Tensor x, y;
  optim::FusedSGD optimizer;
  std::unique_ptr<DistributedDataParallel> ddp;
  std::vector<double> before;  // the weights
};

/// The step of a training whose reduction has failed: it throws, again and again, and even where
/// the group is gone nothing is applied.
void expect_no_step(Training& training, std::initializer_list<std::string> texts) {
  const auto step = [&] { (void)training.optimizer.step(); };
  const auto start = Clock::now();
  expect_error<CommunicationError>(step, texts);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  expect_error<CommunicationError>(step, texts);
  expect_error<CommunicationError>([&] { training.backward(); }, {});
  training.ddp.reset();
  training.group = ProcessGroup::single();
  expect_error<core::Error>(step, {"expected a whole gradient"});
  EXPECT_EQ(weights(training.model), training.before);
}

TEST(Nccl, AnErrorDuringTheHostsPartIsNamed) {
  const auto results = start_ranks(2, [](int) {
    ProcessGroup group = ProcessGroup::from_environment(fast_options());
    Training training(group);
    gpusim::inject("ncclAsyncError", 1, kRemoteError, true);
    const auto start = Clock::now();
    expect_error<CommunicationError>([&] { training.backward(); },
                                     {"rank ", "all_reduce mean f32", "remote process exited"});
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
    EXPECT_EQ(weights(training.model), training.before);
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Nccl, AnErrorDuringTheDevicesPartIsNamedAndNothingIsApplied) {
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(fast_options());
    Training training(group);
    rank == 1 ? training.backward_on_stuck_device() : training.backward();
    group.barrier("queued");
    if (rank == 0) gpusim::inject("ncclAsyncError", 1, kRemoteError, true);
    const std::initializer_list<std::string> texts = {
        "rank 0 failed: collective", "all_reduce mean f32", "remote process exited"};
    if (rank == 0) return expect_no_step(training, texts);
    expect_error<CommunicationError>([&] { (void)training.optimizer.step(); }, texts);
    leave_at_once();
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Nccl, NothingIsAppliedWhenARankDiesInsideOfAReduction) {
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(fast_options());
    Training training(group);
    rank == 1 ? training.backward_on_stuck_device() : training.backward();
    group.barrier("queued");
    if (rank == 1) raise(SIGKILL);
    expect_no_step(training, {"rank 1 died", "collective", "all_reduce mean f32"});
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, rank == 1 ? 128 + SIGKILL : 0) << results[rank].output;
  }
}

/// What NCCL may still write then is no local variable: the simulator would end the process.
TEST(Nccl, ASplitThatOneRankFailsFailsOnAll) {
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(fast_options());
    const Tensor x = on(gpu(group), Tensor::full({100}, 1.0));
    group.all_reduce(x, ReduceOp::sum, "connect");
    group.wait();
    if (rank == 1) gpusim::inject("ncclCommSplit", 1, kRemoteError);
    expect_error<CommunicationError>([&] { (void)group.split(0); }, {"split"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Nccl, ADeviceThatDoesNotComeIsNoticedAfterTheTimeout) {
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(
        {.timeout = std::chrono::seconds(2), .heartbeat_timeout = std::chrono::seconds(2)});
    Training training(group);
    rank == 1 ? training.backward_on_stuck_device() : training.backward();
    const std::initializer_list<std::string> texts = {
        "rank 1 did not come to collective", "all_reduce mean f32", "within 2 s of rank 0"};
    if (rank == 0) return expect_no_step(training, texts);
    expect_error<CommunicationError>([&] { (void)training.optimizer.step(); }, texts);
    leave_at_once();
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

/// The host of the rank that waits has gone on to its step: its device is in the collective.
TEST(Nccl, ARankThatDoesNotComeIsNamed) {
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(
        {.timeout = std::chrono::seconds(2), .heartbeat_timeout = std::chrono::seconds(2)});
    Training training(group);
    if (rank == 1) return test::wait_until_broken(group);
    training.backward();
    expect_no_step(training, {"rank 1 did not come to collective", "all_reduce mean f32",
                              "within 2 s of rank 0"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Nccl, ARankThatLeftIsNamedAtOnce) {
  const auto begin = Clock::now();
  run_as_threads([](ProcessGroup& group) {
    Training training(group);
    if (group.rank() == 1) {
      training.ddp.reset();
      group = ProcessGroup::single();
      return;
    }
    training.backward();
    expect_error<CommunicationError>([&] { (void)training.optimizer.step(); },
                                     {"rank 1 left the group after", "rank 0 needs it"});
  });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(18));  // twice less than its timeout
}

TEST(Nccl, ABroadcastModelIsWholeOrAnError) {
  const auto results = start_ranks(2, [](int rank) {
    ProcessGroup group = ProcessGroup::from_environment(fast_options());
    const Device device = gpu(group);
    nn::Sequential model = make_model(device);
    if (rank == 1) {
      get_stuck(device);
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        raise(SIGKILL);
      }).detach();
    }
    expect_error<CommunicationError>([&] { DistributedDataParallel(model, group); },
                                     {"rank 1 died", "broadcast"});
  });
  if (results.empty()) return;
  EXPECT_EQ(results[0].status, 0) << results[0].output;
}

#endif

}  // namespace
}  // namespace cairn::parallel
