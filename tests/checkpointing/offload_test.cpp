// Activations that wait for the backward elsewhere: bits, memory, errors, what runs beside what.
#include "cairn/checkpointing/offload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/memory.h"
#include "cairn/core/work_observer.h"
#include "cairn/nn/nn.h"
#include "checkpointing/activations.h"
#include "checkpointing/temporary_folder.h"
#include "support/message_of.h"
#include "support/tensors.h"
#ifdef CAIRN_SIMULATED_GPUS
#include "gpu/sim/simulator.h"
#endif

namespace cairn::checkpointing::activations {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
    EXPECT_THAT(test::message_of<core::IoError>([&] {
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
  EXPECT_THAT(test::message_of<core::Error>([&] { autograd::backward(loss); }),
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
  EXPECT_THAT(test::message_of<core::Error>([&] { autograd::backward(changed); }),
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
  const std::string message = test::message_of<core::IoError>([&] {
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
