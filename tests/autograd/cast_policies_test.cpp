// Overrides, bans, plain functions, and the hand-over of a region to other threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;

Tensor cast_policies_f32(const Shape& shape, unsigned seed) {
  return random_tensor(shape, seed, 0.1, 0.9, DType::f32);
}
Tensor half(const Shape& shape, unsigned seed, DType dtype = DType::f16) {
  return random_tensor(shape, seed, 0.1, 0.9, dtype);
}

class Casts : public ScopedObserver {
 public:
  int count = 0, hits = 0;

 private:
  void on_end(const OpEvent& event) override {
    count += std::string_view(event.name) == "cast" ? 1 : 0;
    hits += static_cast<int>(event.cache_hits);
  }
};

TEST(CastPolicies, OverrideAnOperationInsideTheirScopeOnly) {
  const Tensor x = half({2, 4}, 1);
  const AutocastGuard autocast(true);
  {
    const CastPolicyGuard policies({{"softmax", CastPolicy::half}, {"matmul", CastPolicy::f32}});
    EXPECT_EQ(softmax(x).dtype(), DType::f16);
    EXPECT_EQ(softmax(cast_policies_f32({2, 4}, 1)).dtype(), DType::f16);
    EXPECT_EQ(matmul(x, transpose(x, 0, 1)).dtype(), DType::f32);
    EXPECT_EQ(log_softmax(x).dtype(), DType::f32);  // not named
    {
      const CastPolicyGuard inner({{"softmax", CastPolicy::keep}});
      EXPECT_EQ(softmax(cast_policies_f32({2, 4}, 1)).dtype(), DType::f32);
      EXPECT_EQ(matmul(x, transpose(x, 0, 1)).dtype(), DType::f32);  // the outer scope's
    }
    EXPECT_EQ(softmax(x).dtype(), DType::f16);
  }
  EXPECT_EQ(softmax(x).dtype(), DType::f32);
}

TEST(CastPolicies, HoldInRegionsInsideAndNotOutsideOfRegions) {
  const CastPolicyGuard policies({{"softmax", CastPolicy::half}});
  EXPECT_EQ(softmax(cast_policies_f32({2, 4}, 1)).dtype(), DType::f32);
  {
    const AutocastGuard autocast(true, DType::bf16);
    EXPECT_EQ(softmax(cast_policies_f32({2, 4}, 1)).dtype(), DType::bf16);
    const AutocastGuard off(false);
    EXPECT_EQ(softmax(cast_policies_f32({2, 4}, 1)).dtype(), DType::f32);
  }
  EXPECT_EQ(softmax(cast_policies_f32({2, 4}, 1)).dtype(), DType::f32);
}

TEST(CastPolicies, OfAnOperationThatPromotesLeaveOneDtype) {
  const AutocastGuard autocast(true);
  const Tensor narrow = half({2}, 1), wide = cast_policies_f32({2}, 2);
  const CastPolicyGuard policies({{"add", CastPolicy::half}, {"mul", CastPolicy::keep}});
  EXPECT_EQ((wide + wide).dtype(), DType::f16);
  EXPECT_EQ((narrow + random_tensor({2}, 1)).dtype(), DType::f64);
  EXPECT_EQ((narrow * wide).dtype(), DType::f32);
}

TEST(CastPolicies, GradientsComeBackInTheInputsDtype) {
  const Tensor x = leaf({2, 4}, 1, -1, 1, DType::f32);
  Tensor y;
  {
    const AutocastGuard autocast(true);
    const CastPolicyGuard policies({{"softmax", CastPolicy::half}});
    y = softmax(x);
  }
  EXPECT_EQ(y.dtype(), DType::f16);
  backward(y, Tensor::full({2, 4}, 1.0, DType::f16));
  EXPECT_EQ(x.grad().dtype(), DType::f32);
}

TEST(CastPolicies, SuggestNamesThatAreNear) {
  EXPECT_THAT(error_of([] {
                CastPolicyGuard({{"sofmax", CastPolicy::half}});
              }),
              AllOf(HasSubstr("'sofmax'"), HasSubstr("did you mean"), HasSubstr("'softmax'")));
  EXPECT_THAT(error_of([] {
                CastPolicyGuard({{"conv", CastPolicy::f32}});
              }),
              AllOf(HasSubstr("'conv2d'"), HasSubstr("'conv_transpose2d'")));
  EXPECT_THAT(error_of([] {
                CastPolicyGuard({{"zzzzzzzz", CastPolicy::f32}});
              }),
              HasSubstr("half_function"));
  EXPECT_THAT(error_of([] {
                CastPolicyGuard({{"cast", CastPolicy::f32}});
              }),
              HasSubstr("conversion itself"));
  EXPECT_EQ(autocast_state().policies, nullptr);  // a guard that threw left nothing behind
}

// A user's own operation.
struct Twice {
  static constexpr OpInfo kInfo{"users_twice", CastPolicy::half};
  Tensor forward(Context&, const Tensor& x) {
    Tensor y = Tensor::empty_like(x);
    kernels::affine(x, 2.0, 0.0, y);
    return y;
  }
  Tensors backward(Context&, const Tensor& dy) { return {dy}; }
};

TEST(CastPolicies, KnowAUsersOperations) {
  const AutocastGuard autocast(true);
  EXPECT_EQ(apply(Twice{}, cast_policies_f32({2}, 1)).dtype(), DType::f16);
  const CastPolicyGuard policies({{"users_twice", CastPolicy::f32}});
  EXPECT_EQ(apply(Twice{}, half({2}, 1)).dtype(), DType::f32);
}

TEST(Ban, RefusesHalfProbabilitiesInARegionWithAdvice) {
  const Tensor p = half({4}, 1), t = half({4}, 2);
  EXPECT_EQ(binary_cross_entropy(p, t).dtype(), DType::f32);  // no region
  const AutocastGuard autocast(true);
  EXPECT_EQ(binary_cross_entropy(cast_policies_f32({4}, 1), cast_policies_f32({4}, 2)).dtype(),
            DType::f32);
  for (const auto& [x, target] :
       {std::pair{p, t}, {p, cast_policies_f32({4}, 2)}, {cast_policies_f32({4}, 1), t}}) {
    EXPECT_THAT(
        error_of<core::Unsupported>([&] { binary_cross_entropy(x, target); }),
        AllOf(HasSubstr("[binary_cross_entropy]"), HasSubstr("f16"), HasSubstr("bce_with_logits"),
              HasSubstr("CastPolicyGuard({{\"binary_cross_entropy\", CastPolicy::f32}})")));
  }
}

TEST(Ban, IsLiftedByAnOverride) {
  const Tensor p = half({4}, 1), t = cast_policies_f32({4}, 2);
  const AutocastGuard autocast(true);
  const CastPolicyGuard policies({{"binary_cross_entropy", CastPolicy::f32}});
  const Tensor loss = binary_cross_entropy(p, t);
  EXPECT_EQ(loss.dtype(), DType::f32);
  const AutocastGuard off(false);
  EXPECT_EQ(loss.item(), binary_cross_entropy(to(p, DType::f32), t).item());
}

TEST(Ban, CanBeSetOnAnyOperation) {
  const AutocastGuard autocast(true);
  const CastPolicyGuard policies({{"gelu", CastPolicy::banned}});
  EXPECT_THAT(error_of<core::Unsupported>([] { gelu(half({2}, 1)); }), HasSubstr("[gelu]"));
  EXPECT_EQ(gelu(cast_policies_f32({2}, 1)).dtype(), DType::f32);
}

// ---- Plain functions

std::vector<DType> dtypes_of(const Tensor& a, const std::vector<Tensor>& more) {
  std::vector<DType> dtypes{a.dtype()};
  for (const Tensor& x : more) dtypes.push_back(x.dtype());
  return dtypes;
}

TEST(Functions, CastEveryFloatingArgumentInARegion) {
  const Tensor x = cast_policies_f32({2}, 1), narrow = half({2}, 2),
               brain = half({2}, 3, DType::bf16);
  const Tensor wide = random_tensor({2}, 4), index = Tensor::zeros({2}, DType::i64);
  const auto cast = half_function(dtypes_of), widen = float_function(dtypes_of),
             promote = promote_function(dtypes_of);
  using D = DType;
  EXPECT_EQ(cast(x, std::vector{x, narrow}), (std::vector{D::f32, D::f32, D::f16}));  // no region
  const AutocastGuard autocast(true, DType::bf16);
  EXPECT_EQ(cast(x, std::vector{x, narrow, wide, index}),
            (std::vector{D::bf16, D::bf16, D::bf16, D::f64, D::i64}));
  EXPECT_EQ(widen(narrow, std::vector{brain, wide, index}),
            (std::vector{D::f32, D::f32, D::f64, D::i64}));
  EXPECT_EQ(promote(narrow, std::vector{narrow}), (std::vector{D::f16, D::f16}));
  EXPECT_EQ(promote(narrow, std::vector{brain, index}), (std::vector{D::f32, D::f32, D::i64}));
  EXPECT_EQ(promote(narrow, std::vector{x}), (std::vector{D::f32, D::f32}));
  EXPECT_EQ(promote(narrow, std::vector{wide}), (std::vector{D::f64, D::f64}));
}

TEST(Functions, RunWithAutocastOffInside) {
  const auto product =
      float_function([](const Tensor& a, const Tensor& b) { return matmul(a, b); });
  const auto sums = half_function([](const Tensor& a) { return sum(a); });
  const AutocastGuard autocast(true);
  EXPECT_EQ(product(half({2, 2}, 1), half({2, 2}, 2)).dtype(), DType::f32);
  EXPECT_EQ(sums(cast_policies_f32({2, 2}, 1)).dtype(), DType::f16);
  EXPECT_TRUE(autocast_state().enabled);
  EXPECT_NE(autocast_state().cache, nullptr);
}

TEST(Functions, PassOtherArgumentsAsTheyAre) {
  const auto scale =
      half_function([](Tensor x, double factor, int& calls, std::unique_ptr<int> own) {
        calls += *own;
        return x * factor;
      });
  const AutocastGuard autocast(true);
  int calls = 0;
  expect_close(scale(Tensor::full({1}, 2.0), 3.0, calls, std::make_unique<int>(5)), {6.0}, 0);
  EXPECT_EQ(calls, 5);
}

TEST(Functions, UseTheCastCacheForHalfAndKeepTheGraph) {
  const Tensor w = leaf({2, 2}, 1, 0.1, 1, DType::f32), x = cast_policies_f32({2, 2}, 2);
  const auto product = half_function([](const Tensor& a, const Tensor& b) { return matmul(a, b); });
  Tensor loss;
  {
    Casts casts;
    const AutocastGuard autocast(true);
    const Tensor once = product(x, w), twice = product(x, w);
    EXPECT_EQ(casts.count, 3);  // x each time, w once
    loss = sum(once) + sum(twice);
  }
  backward(loss);
  EXPECT_EQ(w.grad().dtype(), DType::f32);
  std::vector<double> columns(2, 0.0);
  const std::vector<double> rounded = to(x, DType::f16).to_vector();
  for (std::size_t i = 0; i < 4; ++i) columns[i % 2] += 2 * rounded[i];
  expect_close(w.grad(), {columns[0], columns[0], columns[1], columns[1]}, 1e-3);
}

// ---- Threads

TEST(Threads, StartOutsideOfAnyRegion) {
  const AutocastGuard autocast(true);
  const CastPolicyGuard policies({{"softmax", CastPolicy::half}});
  bool enabled = true, has_policies = true;
  std::thread([&] {
    enabled = autocast_state().enabled;
    has_policies = autocast_state().policies != nullptr;
  }).join();
  EXPECT_FALSE(enabled);
  EXPECT_FALSE(has_policies);
}

TEST(Threads, EnterARegionByItsThreadState) {
  const Tensor w = leaf({8, 8}, 1, 0.1, 1, DType::f32);
  const AutocastGuard autocast(true, DType::bf16);
  const CastPolicyGuard policies({{"softmax", CastPolicy::half}});
  Casts here;
  matmul(cast_policies_f32({8, 8}, 2), w);
  const ThreadState state = ThreadState::capture();
  std::vector<std::thread> threads;
  std::atomic<int> casts = 0, right = 0;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i, device = core::default_device()] {
      const core::DefaultDeviceGuard on(device);
      const ThreadStateGuard guard(state);
      Casts mine;
      const Tensor y = matmul(half({8, 8}, i, DType::bf16), w);
      right += y.dtype() == DType::bf16 && softmax(y).dtype() == DType::bf16 && y.requires_grad();
      casts += mine.count;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4);
  EXPECT_EQ(casts, 0);  // the copy was in the shared cache
}

TEST(Threads, GoOnAfterTheRegionEnded) {
  const Tensor w = leaf({64, 64}, 1, 0.1, 1, DType::f32), x = half({64, 64}, 2);
  const NoGradGuard no_grad;
  const std::size_t before = core::memory_stats(core::default_device()).current_total;
  std::atomic<int> stage = 0;
  std::thread helper;
  {
    const AutocastGuard autocast(true);
    matmul(x, w);
    helper = std::thread([&, device = core::default_device(), state = ThreadState::capture()] {
      const core::DefaultDeviceGuard on(device);
      const ThreadStateGuard guard(state);
      Casts casts;
      EXPECT_EQ(matmul(x, w).dtype(), DType::f16);
      EXPECT_EQ(casts.count, 0);
      stage = 1;
      while (stage != 2) std::this_thread::yield();
      EXPECT_EQ(core::memory_stats(core::default_device()).current_total,
                before);  // the copy went with the region
      for (int i = 0; i < 2; ++i) EXPECT_EQ(matmul(x, w).dtype(), DType::f16);
      EXPECT_EQ(casts.count, 2);  // and no new one is kept
      EXPECT_EQ(core::memory_stats(core::default_device()).current_total, before);
      EXPECT_TRUE(autocast_state().enabled);
    });
    while (stage != 1) std::this_thread::yield();
  }
  EXPECT_FALSE(autocast_state().enabled);
  stage = 2;
  helper.join();
}

TEST(Threads, OfTwoTrainingsDoNotSeeEachOthersPolicies) {
  std::atomic<int> inside = 0;
  const auto train = [&](CastPolicy policy, DType expected) {
    const AutocastGuard autocast(true);
    const CastPolicyGuard policies({{"softmax", policy}});
    ++inside;
    while (inside < 2) std::this_thread::yield();
    EXPECT_EQ(softmax(half({2, 4}, 1)).dtype(), expected);
  };
  std::thread other([&] { train(CastPolicy::half, DType::f16); });
  train(CastPolicy::f32, DType::f32);
  other.join();
}

TEST(Threads, WriteToOneCacheAtTheSameTime) {
  std::vector<Tensor> weights;
  for (unsigned i = 0; i < 8; ++i) weights.push_back(leaf({4, 4}, i, 0.1, 1, DType::f32));
  const NoGradGuard no_grad;  // graphs of one leaf on several threads would need a lock
  const AutocastGuard autocast(true);
  const ThreadState state = ThreadState::capture();
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i, device = core::default_device()] {
      const core::DefaultDeviceGuard on(device);
      const ThreadStateGuard guard(state);
      const Tensor x = Tensor::full({1, 4}, 1.0, DType::f16);
      for (unsigned step = 0; step < 200; ++step) {
        const Tensor& w = weights[(step + i) % weights.size()];
        wrong += matmul(x, w).dtype() == DType::f16 ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace cairn::autograd
