// Saved-tensor hooks and observers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <any>
#include <string>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/kernels/elementwise.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;

SavedTensorHooks identity() {
  return {[](const Tensor& x) { return std::any(x); },
          [](const std::any& packed) { return std::any_cast<Tensor>(packed); }};
}

TEST(SavedTensorHooks, GetWhatIsSavedAndGiveItBack) {
  const Tensor x = leaf({3}, 1), w = leaf({3}, 2);
  std::vector<Tensor> packed;
  int unpacked = 0;
  Tensor y;
  {
    const SavedTensorHooksGuard guard({[&](const Tensor& t) {
                                         packed.push_back(t);
                                         return std::any(packed.size() - 1);
                                       },
                                       [&](const std::any& index) {
                                         ++unpacked;
                                         return packed[std::any_cast<std::size_t>(index)];
                                       }});
    y = exp(x * w);
  }
  ASSERT_EQ(packed.size(), 3u);
  EXPECT_TRUE(packed[0].same(x));  // a parameter comes as itself
  EXPECT_TRUE(packed[1].same(w));
  EXPECT_FALSE(packed[2].requires_grad());  // a result comes without its graph
  EXPECT_EQ(packed[2].storage(), y.storage());
  backward(sum(y));
  EXPECT_EQ(unpacked, 3);
  const std::vector<double> vx = x.to_vector(), vw = w.to_vector(), vy = y.to_vector();
  expect_close(x.grad(), {vw[0] * vy[0], vw[1] * vy[1], vw[2] * vy[2]}, 1e-12);
}

TEST(SavedTensorHooks, TheInnermostPairGetsTheTensor) {
  std::vector<std::string> order;
  const auto named = [&](const char* name) {
    SavedTensorHooks hooks = identity();
    hooks.pack = [&order, name](const Tensor& x) {
      order.push_back(name);
      return std::any(x);
    };
    return hooks;
  };
  const Tensor x = leaf({2}, 1);
  const SavedTensorHooksGuard outer(named("outer"));
  {
    const SavedTensorHooksGuard inner(named("inner"));
    exp(x);
  }
  exp(x);
  EXPECT_THAT(order, ElementsAre("inner", "outer"));
}

TEST(SavedTensorHooks, OpsInsideAHookSeeOnlyTheHooksAroundIt) {
  const Tensor x = leaf({2}, 1);
  int inner = 0, outer = 0;
  SavedTensorHooks around = identity();
  around.pack = [&](const Tensor& t) {
    ++outer;
    return std::any(t);
  };
  SavedTensorHooks recording{[&](const Tensor& t) {
                               ++inner;
                               const GradModeGuard record(true);
                               exp(leaf({2}, 3));  // saves: for the outer pair
                               return std::any(t);
                             },
                             [&](const std::any& packed) {
                               const GradModeGuard record(true);
                               exp(leaf({2}, 3));
                               return std::any_cast<Tensor>(packed);
                             }};
  const SavedTensorHooksGuard outer_guard(around);
  const SavedTensorHooksGuard inner_guard(recording);
  const Tensor y = exp(x);
  EXPECT_EQ(inner, 1);
  EXPECT_EQ(outer, 1);
  backward(sum(y));
  EXPECT_EQ(inner, 1);
  EXPECT_EQ(outer, 2);
}

TEST(SavedTensorHooks, AnUnpackOfAnotherShapeIsNamed) {
  const Tensor x = leaf({2}, 1);
  SavedTensorHooks hooks = identity();
  hooks.unpack = [](const std::any&) { return Tensor::zeros({3}, DType::f64); };
  Tensor y;
  {
    const SavedTensorHooksGuard guard(hooks);
    y = exp(x);
  }
  EXPECT_THAT(error_of<core::Error>([&] { backward(sum(y)); }),
              ::testing::AllOf(HasSubstr("exp"), HasSubstr("[2]"), HasSubstr("[3]")));
  EXPECT_THAT(error_of([] { SavedTensorHooksGuard guard({}); }), HasSubstr("empty"));
}

// Bytes alive on the CPU.
std::size_t live_bytes() {
  return core::memory_stats(core::default_device()).current_total;
}

TEST(Memory, AGraphIsFreedWithItsRoot) {
  const std::size_t before = live_bytes();
  {
    const Tensor x = leaf({1000}, 1), w = leaf({1000}, 2);
    Tensor y = tanh(exp(x * w)) * x;  // saved inputs, saved outputs, saved parameters
    const SavedTensorHooksGuard guard(identity());
    y = sigmoid(y * w);
  }
  EXPECT_EQ(live_bytes(), before);
}

TEST(Memory, ABackwardFreesWhatWasSavedAndRetainKeepsIt) {
  const Tensor x = leaf({1000}, 1);
  x.gradient_slot().set_own(Tensor::zeros({1000}, DType::f64));
  const std::size_t before = live_bytes();
  const Tensor y = sum(exp(x));
  EXPECT_GT(live_bytes(), before + 7000);
  backward(y, {}, {.retain_graph = true});
  EXPECT_GT(live_bytes(), before + 7000);
  backward(y);
  EXPECT_LT(live_bytes(), before + 1000);
}

TEST(Memory, CrossEntropyWritesItsGradientOverLogitsThatNobodyElseHas) {
  const Tensor x = leaf({100, 100}, 1), target = Tensor::zeros({100}, DType::i64);
  const auto peak = [&](const BackwardOptions& options) {
    x.gradient_slot().clear();
    const Tensor loss = cross_entropy(x * 2.0, target);
    const std::size_t before = live_bytes();
    core::reset_peak_memory(core::default_device());
    backward(loss, {}, options);
    return core::memory_stats(core::default_device()).peak_total - before;
  };
  const std::size_t over = peak({});
  const std::vector<double> gradient = x.grad().to_vector();
  EXPECT_GE(peak({.retain_graph = true}), over + 80000);
  EXPECT_EQ(x.grad().to_vector(), gradient);
  x.gradient_slot().clear();
  const Tensor logits = x * 2.0;
  const std::vector<double> values = logits.to_vector();
  backward(cross_entropy(logits, target));
  EXPECT_EQ(logits.to_vector(), values);
  EXPECT_EQ(x.grad().to_vector(), gradient);
}

TEST(Memory, IsCountedAsActivationsAndGradients) {
  const core::MemoryStats before = core::memory_stats(core::default_device());
  const Tensor x = leaf({1000}, 1);
  const Tensor y = exp(x);
  core::MemoryStats now = core::memory_stats(core::default_device());
  EXPECT_EQ(now.of(core::MemoryCategory::activations),
            before.of(core::MemoryCategory::activations) + 8000);
  backward(sum(y));
  now = core::memory_stats(core::default_device());
  EXPECT_EQ(now.of(core::MemoryCategory::gradients),
            before.of(core::MemoryCategory::gradients) + 8000);
}

// Writes every event down.
class Log : public OpObserver {
 public:
  Log() : previous_(set_observer(this)) {}
  ~Log() override { set_observer(previous_); }
  void begin(const OpEvent& event) override { begun.push_back(event.name); }
  void end(const OpEvent& event) override { events.push_back(event); }
  std::vector<std::string> begun;
  std::vector<OpEvent> events;

 private:
  OpObserver* previous_;
};

TEST(Observer, SeesEveryOperationBothWays) {
  const Tensor x = leaf({10}, 1, -1, 1, DType::f32);
  Log log;
  const Tensor y = sum(exp(x));
  backward(y);
  ASSERT_EQ(log.events.size(), 4u);
  EXPECT_THAT(log.begun, ElementsAre("exp", "sum", "sum", "exp"));
  const OpEvent& forward = log.events[0];
  EXPECT_STREQ(forward.name, "exp");
  EXPECT_EQ(forward.phase, Phase::forward);
  EXPECT_EQ(forward.dtype, DType::f32);
  EXPECT_EQ(forward.bytes_out, 40);
  EXPECT_EQ(forward.bytes_saved, 40);
  EXPECT_EQ(forward.casts, 0);
  EXPECT_GT(forward.host_ns, 0);
  EXPECT_EQ(log.events[1].bytes_saved, 0);
  EXPECT_EQ(log.events[3].phase, Phase::backward);
  EXPECT_EQ(log.events[3].bytes_out, 40);
}

TEST(Observer, CountsCastsAndReplays) {
  const Tensor x = random_tensor({2, 4}, 1, -1, 1, DType::f32);
  const Tensor w = leaf({4, 3}, 2, -1, 1, DType::f32);
  Log log;
  const AutocastGuard autocast(true);
  matmul(x, w);
  ASSERT_EQ(log.events.size(), 3u);
  EXPECT_STREQ(log.events[2].name, "matmul");
  EXPECT_EQ(log.events[2].casts, 2);
  EXPECT_EQ(log.events[2].bytes_cast, 2 * (8 + 12));
  EXPECT_EQ(log.events[2].dtype, DType::f16);
  ThreadState replay = ThreadState::capture();
  replay.recomputing = true;
  const ThreadStateGuard guard(replay);
  relu(x);
  EXPECT_EQ(log.events.back().phase, Phase::recompute);
}

TEST(Observer, IsOneAThread) {
  Log log;
  EXPECT_EQ(set_observer(nullptr), &log);
  relu(random_tensor({2}, 1));
  EXPECT_TRUE(log.events.empty());
  set_observer(&log);
}

}  // namespace
}  // namespace cairn::autograd
