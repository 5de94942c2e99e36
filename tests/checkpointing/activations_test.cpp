// Every way to keep less for the backward, against plain training: bits, memory, operations run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/autograd/saved_bytes.h"
#include "cairn/checkpointing/offload.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/work_observer.h"
#include "cairn/nn/nn.h"
#include "checkpointing/temporary_folder.h"
#include "support/tensors.h"
#ifdef CAIRN_SIMULATED_GPUS
#include "gpu/sim/simulator.h"
#endif

namespace cairn::checkpointing::activations {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;
using Values = std::vector<std::vector<double>>;

Tensor leaf(const Shape& shape, std::uint64_t seed) {
  Tensor x = test::normal_tensor(shape, seed);
  return x.set_requires_grad(true);
}

std::size_t live() {
  return core::memory_stats(core::default_device()).current_total;
}

/// Counts replayed operations by name.
class Replays : public autograd::ScopedObserver {
 public:
  std::map<std::string, int> count;

 private:
  void on_end(const autograd::OpEvent& event) override {
    if (event.phase == autograd::Phase::recompute) ++count[event.name];
  }
};

// ---- Policies

struct Mlp {
  Tensor w1 = leaf({64, 16}, 1), w2 = leaf({16, 64}, 2);
  Tensor operator()(const Tensor& x) const {
    return autograd::linear(autograd::gelu(autograd::linear(x, w1)), w2);
  }
  Values gradients() {
    Values all;
    for (Tensor* w : {&w1, &w2}) {
      all.push_back(w->grad().to_vector());
      w->clear_grad();
    }
    return all;
  }
};

TEST(Policies, KeptOperationsDoNotRunAgain) {
  Mlp mlp;
  const Tensor x = test::normal_tensor({32, 16}, 3);
  autograd::backward(autograd::sum(mlp(x)));
  const Values plain = mlp.gradients();
  const auto replays = [&](const CheckpointOptions& options) {
    const Tensor loss = autograd::sum(
        autograd::tanh(checkpoint([&](const Tensor& z) { return mlp(z); }, x, options)));
    Replays replays;
    autograd::backward(loss);
    mlp.gradients();
    return replays.count;
  };
  using Count = std::map<std::string, int>;
  EXPECT_EQ(replays({}), (Count{{"linear", 1}, {"gelu", 1}}));  // early stop: not the second one
  EXPECT_EQ(replays({.policy = recompute_only({"gelu"})}), (Count{{"gelu", 1}}));
  EXPECT_EQ(replays({.policy = recompute_cheap()}), (Count{{"gelu", 1}}));
  EXPECT_EQ(replays({.policy = save_only({"gelu"})}), (Count{{"linear", 1}}));
  EXPECT_EQ(replays({.policy = recompute_cheap(), .preferred_bytes = 0}),
            (Count{{"linear", 1}, {"gelu", 1}}));
  EXPECT_EQ(replays({.policy = save_only({"linear"}), .preferred_bytes = 0}), (Count{{"gelu", 1}}));
  EXPECT_THAT(message_of<core::InvalidArgument>([] { recompute_only({"gelo"}); }),
              HasSubstr("got 'gelo'"));
  const CheckpointOptions no_offload{
      .policy = [](const SegmentOperation&) { return Treatment::must_offload; }};
  EXPECT_THAT(message_of<core::InvalidArgument>([&] { replays(no_offload); }),
              HasSubstr("CheckpointOptions::offload"));
}

TEST(Policies, RecomputingActivationsOnlyKeepsTheProductsOnly) {
  const Mlp mlp;
  const Tensor x = test::normal_tensor({32, 16}, 3);
  const auto kept = [&](const CheckpointOptions& options) {
    const std::size_t before = live();
    const Tensor y = checkpoint([&](const Tensor& z) { return mlp(z); }, x, options);
    return live() - before;
  };
  const std::size_t hidden = 32 * 64 * 4, result = 32 * 16 * 4;
  EXPECT_EQ(kept({}), result);
  EXPECT_EQ(kept({.policy = recompute_only({"gelu"})}), hidden + result);
  EXPECT_EQ(kept({.policy = save_only({"linear", "gelu"})}), 2 * hidden + result);  // as plain
}

TEST(Policies, SeeEachOperationWithItsNumberAmongThoseOfItsName) {
  const Mlp mlp;
  std::vector<SegmentOperation> seen;
  const Policy policy = [&](const SegmentOperation& operation) {
    seen.push_back(operation);
    return Treatment::must_recompute;
  };
  checkpoint([&](const Tensor& z) { return mlp(z); }, test::normal_tensor({32, 16}, 3),
             {.policy = policy});
  EXPECT_EQ(seen, (std::vector<SegmentOperation>{{"linear", 0}, {"gelu", 0}, {"linear", 1}}));
}

// Once the segment keeps so much, preferences count no more.
TEST(Policies, PreferencesEndWithTheirBytes) {
  const Tensor x = leaf({32, 16}, 3);
  const Policy all = [](const SegmentOperation&) { return Treatment::prefer_save; };
  const auto replays = [&](std::size_t bytes) {
    const Segment chain = [](Tensor z) {
      for (int i = 0; i < 4; ++i) z = autograd::tanh(z);
      return z;
    };
    const Tensor loss =
        autograd::sum(checkpoint(chain, x, {.policy = all, .preferred_bytes = bytes}));
    Replays replays;
    autograd::backward(loss);
    return replays.count["tanh"];
  };
  EXPECT_EQ(replays(SIZE_MAX), 0);
  EXPECT_EQ(replays(2 * x.nbytes()), 1);
  EXPECT_EQ(replays(0), 3);  // a replay ends before the last one
}

// ---- What is kept, counted

TEST(SavedBytes, AreCountedByOperationAndModule) {
  manual_seed(1);
  nn::Sequential model;
  model.add(nn::Linear(16, 64));
  model.add(nn::GELU());
  model.add(nn::Linear(64, 8));
  model.add(nn::Tanh());
  const Tensor x = test::normal_tensor({32, 16}, 3);
  const auto kept_of = [](const std::function<Tensor()>& forward) {
    const std::size_t before = live();
    const autograd::SavedBytes kept = autograd::saved_bytes(forward);
    EXPECT_EQ(live(), before);
    return kept;
  };
  using Bytes = std::map<std::string, std::int64_t>;
  // The first layer keeps x, the GELU its input, the second layer the GELU's result, tanh its own.
  const auto plain = kept_of([&] { return model(x); });
  EXPECT_EQ(
      plain.by_operation,
      (Bytes{{"linear", 32 * 16 * 4 + 32 * 64 * 4}, {"gelu", 32 * 64 * 4}, {"tanh", 32 * 8 * 4}}));
  EXPECT_EQ(plain.by_module,
            (Bytes{{"0", 32 * 16 * 4 + 32 * 64 * 4}, {"2", 32 * 64 * 4 + 32 * 8 * 4}}));
  EXPECT_EQ(plain.total, 32 * 4 * (16 + 64 + 64 + 8));
  const auto recomputed =
      kept_of([&] { return checkpoint([&](const Tensor& z) { return model(z); }, x); });
  EXPECT_EQ(recomputed.by_operation, (Bytes{{"", 32 * 16 * 4}}));
}

// ---- Strategies

Values gradients_of(nn::Sequential& model, const std::function<Tensor()>& forward) {
  model.clear_grad();
  autograd::backward(autograd::mean(forward()));
  Values all;
  for (const auto& p : model.parameters()) all.push_back(p.tensor.grad().to_vector());
  return all;
}

TEST(Strategies, AllHaveTheBitsOfThePlainChain) {
  nn::Sequential model;
  manual_seed(1);
  for (int i = 0; i < 5; ++i) {
    model.add(nn::Linear(8, 8));
    model.add(nn::Tanh());
  }
  const Tensor x = test::normal_tensor({4, 8}, 3);
  const Values plain = gradients_of(model, [&] { return model(x); });
  const std::vector<Strategy> all{Segments{3},    SqrtSegments{}, Uniform{1},  Uniform{4},
                                  FirstBlocks{0}, FirstBlocks{7}, Recursive{}, ConstantMemory{}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(gradients_of(model, [&] { return checkpoint_sequential(model, all[i], x); }), plain)
        << "strategy " << i;
  }
  const std::vector<Strategy> refused{Segments{0}, Segments{11},    Uniform{0},
                                      Uniform{11}, FirstBlocks{-1}, FirstBlocks{11}};
  for (const Strategy& strategy : refused) {
    EXPECT_THROW(checkpoint_sequential(model, strategy, x), core::InvalidArgument);
  }
}

// The peak of a step over a chain of n functions, in activations above what stands before, and the
// operations that were replayed.
struct Cost {
  double peak = 0;
  int replays = 0;
};
Cost cost_of(int n, const Strategy& strategy) {
  const Tensor x = leaf({64, 64}, 1);
  const std::vector<Segment> chain(static_cast<std::size_t>(n),
                                   [](const Tensor& y) { return autograd::tanh(y); });
  const std::size_t before = live();
  core::reset_peak_memory(core::default_device());
  Replays replays;
  autograd::backward(autograd::sum(checkpoint_sequential(chain, strategy, x)));
  const std::size_t peak = core::memory_stats(core::default_device()).peak_total - before;
  return {static_cast<double>(peak) / static_cast<double>(x.nbytes()), replays.count["tanh"]};
}

TEST(Strategies, MemoryScalesAsPromised) {
  std::map<int, Cost> sqrt, recursive, constant;
  for (const int n : {16, 64, 256}) {
    EXPECT_NEAR(cost_of(n, Segments{1}).peak, n, 4) << n;
    sqrt[n] = cost_of(n, SqrtSegments{});
    recursive[n] = cost_of(n, Recursive{});
    if (n < 256) constant[n] = cost_of(n, ConstantMemory{});
    EXPECT_LE(sqrt[n].peak, 2 * std::sqrt(n) + 4) << n;
    EXPECT_LE(sqrt[n].replays, n) << n;
    EXPECT_LE(recursive[n].peak, std::log2(n) + 4) << n;
    EXPECT_LE(recursive[n].replays, n * std::log2(n) / 2) << n;
  }
  EXPECT_EQ(constant[16].peak, constant[64].peak);
  EXPECT_LE(constant[64].peak, 5);
  EXPECT_LE(constant[64].replays, 64 * 64 / 2);
}

// ---- Offload

TEST(Offload, TheBackwardHasTheSameBitsAndTheMemoryIsElsewhere) {
  const TemporaryFolder folder;
  Offload offload({.folder = folder.string(), .min_bytes = 1 << 10});
  nn::Sequential model;
  manual_seed(1);
  for (int i = 0; i < 12; ++i) {
    model.add(nn::Linear(64, 64));
    model.add(nn::GELU());
  }
  const Tensor x = test::normal_tensor({256, 64}, 3);
  const Values plain = gradients_of(model, [&] { return model(x); });
  model.clear_grad();
  Tensor loss;
  const std::size_t before = live();
  core::reset_peak_memory(core::default_device());
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    loss = autograd::mean(model(x));
  }
  offload.synchronize();
  const std::size_t activation = x.nbytes();
  EXPECT_LE(live() - before, activation / 4);
  EXPECT_GE(offload.stats().stored_bytes, 23 * activation);
  EXPECT_TRUE(std::filesystem::is_empty(folder.string()));  // the files have no names
  autograd::backward(loss);
  Values gradients;
  for (const auto& p : model.parameters()) gradients.push_back(p.tensor.grad().to_vector());
  EXPECT_EQ(gradients, plain);
  EXPECT_EQ(offload.stats().fetched_bytes, offload.stats().copied_bytes);  // each once
  EXPECT_EQ(offload.stats().stored_bytes, 0u);
  // Two on their way, one fetched ahead, and what an operation works on.
  std::size_t parameters = 0;
  for (const auto& p : model.parameters()) parameters += p.tensor.nbytes();
  EXPECT_LE(core::memory_stats(core::default_device()).peak_total - before,
            parameters + 7 * activation);
}

TEST(Offload, AStorageThatManyShareGoesOnceAndComesBackAsOne) {
  Offload offload({.min_bytes = 1});
  const Tensor qkv = leaf({32, 3 * 16}, 1);
  const auto loss_of = [&] {
    const Tensor base = autograd::tanh(qkv);
    const Tensor q = autograd::slice(base, 1, 0, 16), k = autograd::slice(base, 1, 16, 32);
    return autograd::sum(q * k * autograd::slice(base, 1, 32, 48));
  };
  autograd::backward(loss_of());
  const auto plain = qkv.grad().to_vector();
  Tensor(qkv).clear_grad();
  Tensor loss;
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    loss = loss_of();
  }
  EXPECT_EQ(offload.stats().copied_bytes, qkv.nbytes() + qkv.nbytes() / 3);  // base and q * k
  autograd::backward(loss);
  EXPECT_EQ(qkv.grad().to_vector(), plain);
}

TEST(Offload, ErrorsLeaveNothingBehind) {
  const TemporaryFolder folder;
  const Tensor x = leaf({32, 16}, 1);
  const std::size_t before = live();
  if (core::default_device().is_cpu()) {  // a GPU offloads to no folder
    Offload missing({.folder = folder / "missing", .min_bytes = 1});
    EXPECT_THAT(message_of<core::IoError>([&] {
                  const autograd::SavedTensorHooksGuard hooks(missing.hooks());
                  autograd::tanh(autograd::tanh(x));
                }),
                AllOf(HasSubstr("[offload]"), HasSubstr("missing"), HasSubstr("No such file")));
    EXPECT_EQ(live(), before);
  }
  Offload offload({.folder = folder.string(), .min_bytes = 1});
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    const Tensor y = autograd::tanh(autograd::tanh(x));  // no backward
  }
  offload.synchronize();
  EXPECT_EQ(live(), before);
  EXPECT_EQ(offload.stats().stored_bytes, 0u);
  EXPECT_TRUE(std::filesystem::is_empty(folder.string()));
}

TEST(Offload, WritesInBetweenAreAnError) {
  Offload offload({.min_bytes = 1});
  const Tensor x = test::normal_tensor({32, 16}, 1), w = leaf({32, 16}, 2);
  const autograd::SavedTensorHooksGuard hooks(offload.hooks());
  const Tensor loss = autograd::sum(x * w);
  x.storage()->bump_version();
  EXPECT_THAT(message_of<core::Error>([&] { autograd::backward(loss); }),
              HasSubstr("written in place"));
}

// A write behind the copy changes nothing, one ahead of its end may have changed a part of it.
TEST(Offload, WritesWhileACopyIsOnItsWayAreAnError) {
  Offload offload({.min_bytes = 1});
  const Tensor x = test::normal_tensor({32, 16}, 1), w = leaf({32, 16}, 2);
  const auto loss = [&] {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    return autograd::sum(x * w);
  };
  const Tensor changed = loss();
  x.storage()->bump_version();
  offload.synchronize();
  EXPECT_THAT(message_of<core::Error>([&] { autograd::backward(changed); }),
              HasSubstr("written in place"));
  const Tensor good = loss();
  offload.synchronize();
  x.storage()->bump_version();
  autograd::backward(good);
  EXPECT_EQ(w.grad().to_vector(), x.to_vector());
}

TEST(Offload, ATensorThatIsWrittenBetweenTwoOperationsGoesOutTwice) {
  Offload offload({.min_bytes = 1});
  const Tensor x = test::normal_tensor({32, 16}, 1), first = leaf({32, 16}, 2),
               second = leaf({32, 16}, 3);
  const auto before = x.to_vector();
  Tensor loss;
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    const Tensor y = autograd::sum(x * first);
    offload.synchronize();
    core::copy_bytes(test::normal_tensor({32, 16}, 4), x);
    x.storage()->bump_version();
    loss = y + autograd::sum(x * second);
  }
  autograd::backward(loss);
  EXPECT_EQ(first.grad().to_vector(), before);
  EXPECT_EQ(second.grad().to_vector(), x.to_vector());
}

TEST(Offload, SmallTensorsStay) {
  const Tensor x = leaf({32, 16}, 1);
  Offload offload({.min_bytes = x.nbytes() + 1});
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    autograd::backward(autograd::sum(autograd::tanh(autograd::tanh(x))));
  }
  EXPECT_EQ(offload.stats().copied_bytes, 0u);
}

// Resident bytes of the process that are pages of files.
std::size_t resident_file_bytes() {
  std::ifstream status("/proc/self/status");
  std::size_t kilobytes = 0;
  for (std::string word; status >> word;) {
    std::size_t value = 0;
    if ((word == "RssFile:" || word == "RssShmem:") && status >> value) kilobytes += value;
  }
  return kilobytes << 10;
}

TEST(Offload, TheProcessHoldsLittleOfTheFiles) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "a GPU offloads to no file";
  const TemporaryFolder folder;
  Offload offload({.folder = folder.string(), .min_bytes = 1});
  Tensor y = leaf({4 << 20}, 1);  // 16 MiB
  const std::size_t before = resident_file_bytes();
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    for (int i = 0; i < 3; ++i) y = autograd::tanh(y);
  }
  offload.synchronize();
  EXPECT_GE(offload.stats().stored_bytes, 3 * y.nbytes());
  EXPECT_LE(resident_file_bytes(), before + y.nbytes() / 2);
  autograd::backward(autograd::sum(y));
  EXPECT_LE(resident_file_bytes(), before + y.nbytes() / 2);
}

// A file that may not grow any further stands in for a full disk.
TEST(Offload, AFullDiskIsAnErrorInTheForward) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "a GPU offloads to no file";
  const TemporaryFolder folder;
  Offload offload({.folder = folder.string(), .min_bytes = 1});
  const Tensor x = leaf({64, 1024}, 1);
  const auto previous_handler = signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit tiny = before;
  tiny.rlim_cur = 4096;
  setrlimit(RLIMIT_FSIZE, &tiny);
  const std::string message = message_of<core::IoError>([&] {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    autograd::tanh(x);
  });
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, previous_handler);
  EXPECT_THAT(message, AllOf(HasSubstr("reserve 262144 bytes"), HasSubstr(folder.string()),
                             HasSubstr("more room")));
}

// ---- Offload beside the computation

/// Linear and GELU in turn: each operation saves its input and nothing else that goes out.
struct Chain {
  explicit Chain(int pairs) {
    manual_seed(1);
    for (int i = 0; i < pairs; ++i) {
      model.add(nn::Linear(64, 64));
      model.add(nn::GELU());
    }
  }
  Tensor loss(Offload& offload) {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    return autograd::mean(model(x));
  }
  nn::Sequential model;
  Tensor x = test::normal_tensor({256, 64}, 3);
};

// Holds each copy out until the operation after its own has ended, and each operation's backward
// until the copies for the two next ones have: neither comes where one waits for the other.
class Gates : public autograd::ScopedObserver, private core::WorkObserver {
 public:
  explicit Gates(int operations) : operations_(operations) {}
  int out = 0, in = 0, missed = 0;

  void end_of_forward() {
    const std::lock_guard lock(mutex_);
    forward_ended_ = operations_ + 1;
    changed_.notify_all();
  }

 private:
  void on_end(const autograd::OpEvent& event) override {
    const std::string_view name = event.name;
    if (name != "linear" && name != "gelu") return;
    std::unique_lock lock(mutex_);
    if (event.phase == autograd::Phase::forward) {
      ++forward_ended_;
      changed_.notify_all();
      return;
    }
    const int fetched = std::min(++backward_ended_ + 2, operations_);
    wait(lock, [&] { return in >= fetched; });
  }

  void ran(const core::ObservedWork& work) override {
    std::unique_lock lock(mutex_);
    if (work.stream == "offload in") ++in;
    if (work.stream == "offload out") {
      const int own = ++out;
      wait(lock, [&] { return forward_ended_ > own; });
    }
    changed_.notify_all();
  }

  template <class Come>
  void wait(std::unique_lock<std::mutex>& lock, Come come) {
    if (!changed_.wait_for(lock, std::chrono::seconds(10), come)) ++missed;
  }

  int operations_, forward_ended_ = 0, backward_ended_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  core::WorkObservation observation_{*this};
};

TEST(Offload, OnTheCpuCopiesRunBesideOperationsBothWays) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "a GPU's copies end unobserved";
  const TemporaryFolder folder;
  Offload offload({.folder = folder.string(), .min_bytes = 1 << 10});
  Chain chain(4);
  Gates gates(8);
  const Tensor loss = chain.loss(offload);
  gates.end_of_forward();
  offload.synchronize();
  autograd::backward(loss);
  offload.synchronize();
  EXPECT_EQ(gates.out, 8);
  EXPECT_EQ(gates.in, 8);
  EXPECT_EQ(gates.missed, 0);
}

#ifdef CAIRN_SIMULATED_GPUS

struct TracedStep {
  std::vector<gpusim::TracedWork> copies;                   // in the offload's streams
  std::vector<std::vector<gpusim::TracedWork>> operations;  // the works of each
};

/// Takes apart what a chain of Linear and GELU queued.
TracedStep taken_apart(const std::vector<gpusim::TracedWork>& works) {
  TracedStep step;
  bool in_gelu = true;
  for (const gpusim::TracedWork& work : works) {
    const auto has = [&](const char* text) { return work.name.find(text) != std::string::npos; };
    if (work.point.stream != 0) {
      step.copies.push_back(work);
      continue;
    }
    const bool gelu = has("unary"), linear = has("matmul") || (!in_gelu && has("reduce"));
    if (!gelu && !linear) continue;  // the loss
    if (gelu || in_gelu || step.operations.empty()) step.operations.emplace_back();
    step.operations.back().push_back(work);
    in_gelu = gelu;
  }
  return step;
}

bool runs_beside_all(const gpusim::TracedWork& copy, const std::vector<gpusim::TracedWork>& works) {
  return std::all_of(works.begin(), works.end(),
                     [&](const auto& work) { return work.runs_beside(copy); });
}

TEST(Offload, OnAGpuCopiesRunBesideTheNextOperationBothWays) {
  if (core::default_device().is_cpu()) GTEST_SKIP() << "takes a GPU";
  Offload offload({.min_bytes = 1 << 10});
  Chain chain(6);
  // In the others the host sees works done that need not be.
  const gpusim::Schedule before = gpusim::set_schedule(gpusim::Schedule::late, 1);
  gpusim::begin_trace();
  const Tensor loss = chain.loss(offload);
  const TracedStep forward = taken_apart(gpusim::end_trace());
  offload.synchronize();
  gpusim::begin_trace();
  autograd::backward(loss);
  const TracedStep backward = taken_apart(gpusim::end_trace());
  gpusim::set_schedule(before, 1);
  for (const TracedStep& step : {forward, backward}) {
    ASSERT_EQ(step.copies.size(), 12u);
    ASSERT_EQ(step.operations.size(), 12u);
  }
  for (std::size_t i = 0; i + 1 < 12; ++i) {
    EXPECT_TRUE(runs_beside_all(forward.copies[i], forward.operations[i + 1])) << i;
    EXPECT_TRUE(runs_beside_all(backward.copies[i + 1], backward.operations[i])) << i;
  }
}

#endif

// A GPU's host is ahead of it: it must not fetch everything before the first operation has run.
TEST(Offload, TheBackwardReusesTheMemoryOfWhatItFetched) {
  const Device device = core::default_device();
  const TemporaryFolder folder;
  Offload offload({.folder = folder.string(), .min_bytes = 1 << 10});
  Chain chain(20);
  const Tensor loss = chain.loss(offload);
  offload.synchronize();
  core::release_cached_memory(device);
  std::size_t parameters = 0;
  for (const auto& p : chain.model.parameters()) parameters += p.tensor.nbytes();
  const std::size_t before = core::memory_stats(device).reserved;
  autograd::backward(loss);
  EXPECT_LE(core::memory_stats(device).reserved - before, 2 * parameters + 12 * chain.x.nbytes());
}

}  // namespace
}  // namespace cairn::checkpointing::activations
