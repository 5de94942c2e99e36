#include "cairn/autograd/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/kernels/elementwise.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;

// y = x * w, written with either operand first.
struct Scale {
  static constexpr OpInfo kInfo{"scale"};
  Tensor forward(Context& ctx, const Tensor& x, const Tensor& w) {
    ctx.save(x);
    ctx.save(w);
    Tensor y = Tensor::empty_like(x);
    kernels::binary(kernels::BinaryOp::mul, x, w, y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = Tensor::empty_like(dy), dw = Tensor::empty_like(dy);
    kernels::binary(kernels::BinaryOp::mul, dy, ctx.saved(1), dx);
    kernels::binary(kernels::BinaryOp::mul, dy, ctx.saved(0), dw);
    return {dx, dw};
  }
};

// Its backward returns whatever a test wants.
struct Wrong {
  static constexpr OpInfo kInfo{"wrong"};
  std::function<Tensors(Context&, const Tensor&)> gradients;
  Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) { return gradients(ctx, dy); }
};

Tensor ones_like(const Tensor& x) {
  return Tensor::full(x.shape(), 1.0, x.dtype());
}

// Its backward adds slope dy to what is there.
Wrong user(double slope, std::vector<bool>* accumulated = nullptr) {
  return {[accumulated, slope](Context& ctx, const Tensor& dy) {
    const GradTarget target = ctx.grad_target(0);
    if (accumulated != nullptr) accumulated->push_back(target.accumulate);
    kernels::axpby(slope, dy, target.accumulate ? 1.0 : 0.0, target.tensor);
    return Tensors{target.tensor};
  }};
}

TEST(GradTarget, OfATensorWithSeveralUsersIsTheSumOfTheirs) {
  const Tensor w = leaf({3, 2}, 1);
  const Tensor x = exp(w);  // no leaf
  std::vector<bool> accumulated;
  const Tensor y = apply(user(2.0, &accumulated), x) + apply(user(3.0, &accumulated), x) +
                   apply(user(4.0, &accumulated), x);
  backward(sum(y));
  EXPECT_THAT(accumulated, ElementsAre(false, true, true));
  std::vector<double> expected = x.to_vector();
  for (double& value : expected) value *= 9.0;
  expect_close(w.grad(), expected, 1e-12);
}

TEST(GradTarget, IsNotATensorThatSomebodyElseHas) {
  const Tensor w = leaf({3}, 1);
  const Tensor x = exp(w), e = exp(x), u = apply(user(2.0), x);
  // add hands one dy to x and e; the user of x comes before e has taken it.
  const Tensor y = x + e;
  backward(sum(y * 5.0) + sum(u));
  std::vector<double> expected;
  for (const double v : x.to_vector()) expected.push_back((5.0 + 5.0 * std::exp(v) + 2.0) * v);
  expect_close(w.grad(), expected, 1e-12);
}

TEST(GradTarget, IsNoGradientOfAnotherLayout) {
  const Tensor w = leaf({3, 2}, 1);
  std::vector<bool> accumulated;
  const Tensor x = exp(w), u = apply(user(2.0, &accumulated), x);
  backward(sum(u) + sum(sum(x, {0}) * 5.0));  // the second's gradient repeats a row
  EXPECT_THAT(accumulated, ElementsAre(false));
  std::vector<double> expected;
  for (const double v : x.to_vector()) expected.push_back(7.0 * v);
  expect_close(w.grad(), expected, 1e-12);
}

struct Same {
  static constexpr OpInfo kInfo{"same"};
  Tensor forward(Context&, const Tensor& x) { return x; }
  Tensors backward(Context&, const Tensor& dy) { return {dy}; }
};

TEST(Engine, AnOperationMayReturnItsInput) {
  const Tensor x = leaf({3}, 1), y = apply(Same{}, x);
  EXPECT_FALSE(y.same(x));
  EXPECT_EQ(x.attachments().graph, nullptr);
  backward(sum(y * 3.0));
  EXPECT_THAT(x.grad().to_vector(), ElementsAre(3, 3, 3));
}

TEST(GradTarget, MustBeReturnedWhereItHoldsASum) {
  const Tensor w = leaf({3}, 1), x = exp(w);
  const Wrong first{[](Context& ctx, const Tensor&) {
    const Tensor fresh = ctx.grad_target(0).tensor;
    kernels::fill(fresh, 1.0);
    return Tensors{fresh};
  }};
  const Wrong other{[](Context& ctx, const Tensor& dy) {
    ctx.grad_target(0);
    return Tensors{ones_like(dy)};
  }};
  const Tensor earlier = apply(other, x);  // runs last
  EXPECT_THAT(error_of([&] { backward(sum(earlier + apply(first, x))); }),
              HasSubstr("expected the tensor of grad_target"));
}

TEST(GradTarget, OfASequenceOfSlicesIsWrittenInParts) {
  const Tensor w = leaf({20, 3}, 1), x = exp(w);
  Tensors steps;
  for (std::int64_t t = 0; t < 20; ++t) steps.push_back(slice(x, 0, t, t + 1) * double(t));
  backward(sum(concat(steps)));
  std::vector<double> expected = x.to_vector();
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] *= double(i / 3);
  expect_close(w.grad(), expected, 1e-12);
}

class HookOrder : public ::testing::TestWithParam<bool> {};

TEST_P(HookOrder, IsReverseLayerOrderWhateverTheOperandOrder) {
  const bool weight_first = GetParam();
  Tensors weights;
  std::vector<HookHandle> handles;
  std::vector<int> order;
  for (int i = 0; i < 4; ++i) {
    weights.push_back(leaf({3}, static_cast<unsigned>(i)));
    handles.push_back(on_gradient_ready(weights.back(), [&order, i](const Tensor& w) {
      EXPECT_TRUE(w.grad().defined());
      order.push_back(i);
    }));
  }
  Tensor x = testing::random_tensor({3}, 7);
  for (const Tensor& w : weights) x = weight_first ? apply(Scale{}, w, x) : apply(Scale{}, x, w);
  backward(x, ones_like(x));
  EXPECT_THAT(order, ElementsAre(3, 2, 1, 0));
}

INSTANTIATE_TEST_SUITE_P(Operands, HookOrder, ::testing::Bool());

TEST(Engine, FiresALeafBeforeEarlierLayersRun) {
  const Tensor w0 = leaf({2}, 1), w1 = leaf({2}, 2);
  bool first_layer_done = false;
  const HookHandle h0 = on_gradient_ready(w0, [&](const Tensor&) { first_layer_done = true; });
  const HookHandle h1 = on_gradient_ready(w1, [&](const Tensor&) {
    EXPECT_FALSE(first_layer_done);
    EXPECT_FALSE(w0.grad().defined());
  });
  const Tensor x = testing::random_tensor({2}, 3);
  backward(sum(apply(Scale{}, apply(Scale{}, x, w0), w1)));
  EXPECT_TRUE(first_layer_done);
}

TEST(Engine, TiedWeightsFireOnceWithTheWholeGradient) {
  const Tensor w = leaf({3}, 1);
  int fired = 0;
  std::vector<double> seen;
  const HookHandle handle = on_gradient_ready(w, [&](const Tensor& leaf) {
    ++fired;
    seen = leaf.grad().to_vector();
  });
  const Tensor y = w * w * w;
  backward(y, ones_like(y));
  EXPECT_EQ(fired, 1);
  const std::vector<double> values = w.to_vector();
  std::vector<double> expected;
  for (double v : values) expected.push_back(3 * v * v);
  expect_close(w.grad(), expected, 1e-12);
  EXPECT_EQ(seen, w.grad().to_vector());
}

TEST(Engine, ARemovedHookDoesNotFireAndHooksSurviveACastOfTheLeaf) {
  Tensor w = leaf({2}, 1);
  int kept = 0, removed = 0;
  const HookHandle keep = on_gradient_ready(w, [&](const Tensor&) { ++kept; });
  (void)on_gradient_ready(w, [&](const Tensor&) { ++removed; });
  w.set_data(testing::random_tensor({2}, 5, -1, 1, DType::f32));
  const Tensor y = w + w;
  backward(y, ones_like(y));
  EXPECT_EQ(kept, 1);
  EXPECT_EQ(removed, 0);
  EXPECT_EQ(w.grad().dtype(), DType::f32);
}

TEST(Engine, AMillionNodeChainRunsAndIsReleased) {
  const Tensor x = leaf({1}, 1);
  Tensor y = x;
  for (int i = 0; i < 1'000'000; ++i) y = y + 1.0;
  backward(y, ones_like(y));
  expect_close(x.grad(), {1.0}, 0.0);
}

TEST(Engine, ALongChainThatSavesItsInputsIsReleasedWithoutRecursion) {
  const Tensor x = leaf({1}, 1), w = leaf({1}, 2);
  Tensor y = x;
  for (int i = 0; i < 200'000; ++i) y = apply(Scale{}, y, w);
  y = Tensor();
  SUCCEED();
}

TEST(Engine, AccumulatesOverBackwards) {
  const Tensor w = leaf({2}, 1), x = testing::random_tensor({2}, 2);
  for (int i = 0; i < 3; ++i) {
    const Tensor y = w * x;
    backward(y, ones_like(y));
  }
  std::vector<double> expected;
  for (double v : x.to_vector()) expected.push_back(3 * v);
  expect_close(w.grad(), expected, 1e-12);
}

TEST(Engine, GradientsOfTwoLeavesNeverShareMemory) {
  const Tensor a = leaf({2}, 1), b = leaf({2}, 2);
  const Tensor y = a + b;
  const Tensor dy = ones_like(y);
  backward(y, dy);
  kernels::fill(a.grad(), 5.0);
  expect_close(b.grad(), {1.0, 1.0}, 0.0);
  expect_close(dy, {1.0, 1.0}, 0.0);
}

TEST(Engine, AGraphServesOneBackwardUnlessRetained) {
  const Tensor x = leaf({2}, 1);
  const Tensor y = sum(x * x);
  backward(y, {}, {.retain_graph = true});
  backward(y);
  std::vector<double> expected;
  for (double v : x.to_vector()) expected.push_back(4 * v);
  expect_close(x.grad(), expected, 1e-12);
  const std::string message = error_of<core::Error>([&] { backward(y); });
  EXPECT_THAT(message, HasSubstr("released"));
  EXPECT_THAT(message, HasSubstr("retain_graph"));
  expect_close(x.grad(), expected, 1e-12);  // nothing was added before the error
}

TEST(Engine, GradientsOfGradientsAreRefusedByName) {
  const Tensor x = leaf({2}, 1);
  const Tensor y = sum(x * x);
  const std::string message =
      error_of<core::Unsupported>([&] { backward(y, {}, {.create_graph = true}); });
  EXPECT_THAT(message, HasSubstr("expected create_graph false, got true"));
  EXPECT_THAT(message, HasSubstr("a recorded backward of every operation"));
  EXPECT_THAT(message, HasSubstr("(loss(x + h d) - loss(x - h d)) / (2 h)"));
  EXPECT_FALSE(x.grad().defined());
  backward(y);  // the graph is whole
  const Tensor penalty = sum(x.grad() * x.grad());
  EXPECT_THAT(error_of<core::InvalidArgument>([&] { backward(penalty); }),
              HasSubstr("or of gradients, which are constants?"));
}

class Untrained : public ::testing::Test {
 protected:
  Untrained() { trained_.gradient_slot().claim(optimizer_); }
  static Tensor named(const std::string& name, std::uint64_t seed) {
    Tensor x = leaf({2}, seed);
    x.set_name(name);
    return x;
  }
  static std::string said_by(const Tensor& loss) {
    ::testing::internal::CaptureStderr();
    backward(loss);
    return ::testing::internal::GetCapturedStderr();
  }

  std::shared_ptr<const void> optimizer_ = std::make_shared<int>();
  Tensor trained_ = named("trained", 1);
};

TEST_F(Untrained, AParameterBesideTrainedOnesIsNamedOnce) {
  const Tensor forgotten = named("fc.weight", 2), too = named("fc.bias", 3);
  EXPECT_THAT(said_by(sum(trained_ * forgotten + too)),
              HasSubstr("no optimizer has the parameter 'fc.bias' and 1 more, which got a gradient "
                        "beside others that are trained"));
  EXPECT_EQ(said_by(sum(trained_ * forgotten + too)), "");
}

TEST_F(Untrained, InputsFrozenOnesAndModelsWithoutAnOptimizerAreNotNamed) {
  const Tensor input = leaf({2}, 2);
  Tensor frozen = named("frozen", 3);
  frozen.set_requires_grad(false);
  EXPECT_EQ(said_by(sum(trained_ * input + frozen)), "");
  const Tensor a = named("a", 4), b = named("b", 5);
  EXPECT_EQ(said_by(sum(a * b)), "");  // a trainer with an update of its own
  optimizer_.reset();
  EXPECT_EQ(said_by(sum(trained_ * a)), "");
}

TEST(Engine, NamesAnOpWhoseSavedTensorWasWrittenInPlace) {
  const Tensor x = leaf({2}, 1), w = leaf({2}, 2);
  const Tensor y = sum(x * w);
  kernels::fill(w, 3.0);
  EXPECT_THAT(error_of<core::Error>([&] { backward(y); }),
              ::testing::AllOf(HasSubstr("mul"), HasSubstr("in place")));
}

TEST(Engine, ChecksWhatABackwardReturns) {
  const auto run = [](std::function<Tensors(Context&, const Tensor&)> gradients) {
    const Tensor x = leaf({2, 3}, 1);
    const Tensor y = apply(Wrong{std::move(gradients)}, x * x);
    return error_of([&] { backward(y, ones_like(y)); });
  };
  const std::string shape =
      run([](Context&, const Tensor&) { return Tensors{Tensor::zeros({3}, DType::f64)}; });
  EXPECT_THAT(shape, HasSubstr("[backward of wrong]"));
  EXPECT_THAT(shape, HasSubstr("[2, 3]"));
  EXPECT_THAT(run([](Context&, const Tensor&) {
                return Tensors{Tensor::zeros({2, 3}, DType::f32)};
              }),
              HasSubstr("f32"));
  EXPECT_THAT(run([](Context&, const Tensor&) { return Tensors{}; }),
              HasSubstr("expected 1 gradients, got 0"));
}

TEST(Engine, AGradientTargetMustComeBack) {
  Tensor x = leaf({2}, 1);
  x.set_grad(Tensor::zeros({2}, DType::f64));
  const Tensor y = apply(Wrong{[](Context& ctx, const Tensor& dy) {
                           ctx.grad_target(0);
                           return Tensors{dy};
                         }},
                         x);
  EXPECT_THAT(error_of([&] { backward(y, ones_like(y)); }), HasSubstr("grad_target"));
}

TEST(Engine, ErrorsKeepTheirTypeAndNameTheNode) {
  const Tensor x = leaf({2}, 1);
  const auto throwing = [&](auto error) {
    const Tensor y = apply(Wrong{[=](Context&, const Tensor&) -> Tensors { throw error; }}, x);
    backward(y, ones_like(y));
  };
  EXPECT_THAT(error_of<core::OutOfMemory>([&] { throwing(core::OutOfMemory("full")); }),
              ::testing::AllOf(HasSubstr("wrong"), HasSubstr("full")));
  EXPECT_THROW(throwing(std::logic_error("mine")), std::logic_error);
  EXPECT_FALSE(in_backward());
  EXPECT_TRUE(grad_enabled());
}

TEST(Engine, RejectsRootsWithoutAGraphAndWrongGradients) {
  const Tensor x = leaf({2}, 1);
  EXPECT_THAT(error_of([&] { backward(testing::random_tensor({1}, 1)); }), HasSubstr("graph"));
  EXPECT_THAT(error_of([&] { backward(Tensor()); }), HasSubstr("undefined"));
  EXPECT_THAT(error_of([&] { backward(x * x); }), HasSubstr("more than one element"));
  EXPECT_THAT(error_of([&] { backward(x * x, Tensor::zeros({3}, DType::f64)); }), HasSubstr("[3]"));
}

TEST(Engine, NoGradRecordsNothing) {
  const Tensor x = leaf({2}, 1);
  {
    const NoGradGuard no_grad;
    EXPECT_FALSE((x * x).requires_grad());
    const GradModeGuard again(true);
    EXPECT_TRUE((x * x).requires_grad());
  }
  EXPECT_TRUE((x * x).requires_grad());
}

TEST(Engine, ALeafMayBeTheRoot) {
  const Tensor x = leaf({1}, 1);
  backward(x);
  expect_close(x.grad(), {1.0}, 0.0);
}

TEST(Engine, TurnsAutocastAndRecordingOffAndRestoresThem) {
  manual_seed(5);
  const Tensor x = leaf({2}, 1, -1, 1, DType::f32);
  bool seen = false;
  const HookHandle handle = on_gradient_ready(x, [&](const Tensor&) {
    seen = true;
    EXPECT_FALSE(autocast_state().enabled);
    EXPECT_FALSE(grad_enabled());
    EXPECT_TRUE(in_backward());
    Generator::current().next();
  });
  const AutocastGuard autocast(true, DType::bf16);
  backward(sum(x * x));
  EXPECT_TRUE(seen);
  EXPECT_TRUE(autocast_state().enabled);
  EXPECT_EQ(autocast_state().dtype, DType::bf16);
  EXPECT_EQ(Generator::current().offset(), 0u);
}

TEST(Engine, EndCallbacksRunOnceAfterTheLastNode) {
  const Tensor a = leaf({2}, 1), b = leaf({2}, 2);
  std::vector<std::string> events;
  const auto hook = [&](const char* name) {
    return [&events, name](const Tensor&) {
      events.push_back(name);
      if (events.size() > 1) return;
      on_backward_end([&events] {
        events.push_back("end");
        on_backward_end([&events] { events.push_back("later"); });
      });
    };
  };
  const HookHandle ha = on_gradient_ready(a, hook("a")), hb = on_gradient_ready(b, hook("b"));
  backward(sum(a * a * b));
  EXPECT_THAT(events, ElementsAre("b", "a", "end", "later"));
  EXPECT_THAT(error_of([] { on_backward_end([] {}); }), HasSubstr("outside"));
}

TEST(Engine, AnErrorOfAnEndCallbackReachesTheCaller) {
  const Tensor x = leaf({1}, 1);
  const HookHandle handle = on_gradient_ready(
      x, [](const Tensor&) { on_backward_end([] { throw std::runtime_error("late"); }); });
  EXPECT_THROW(backward(x * x), std::runtime_error);
}

/// Ranks whose runs are refused name the same parameter.
TEST(Engine, LeavesBeginInTheOrderOfTheGraph) {
  std::vector<Tensor> leaves;  // of all runs: at other addresses in each
  const auto refusal_of_one_run = [&leaves] {
    Tensor total;
    for (int i = 0; i < 40; ++i) {
      leaves.push_back(leaf({1}, static_cast<std::uint64_t>(i)));
      leaves.back().set_name("leaf " + std::to_string(i));
      core::GradientSlot& slot = leaves.back().gradient_slot();
      slot.place(Tensor::zeros({1}));
      slot.mark_written({.scaler = core::next_scaler_id()});
      total = total.defined() ? total + leaves.back() : leaves.back() + leaves.back();
    }
    return error_of([&] { backward(sum(total)); });
  };
  const std::string first = refusal_of_one_run();
  EXPECT_THAT(first, HasSubstr("in 'leaf"));
  EXPECT_EQ(refusal_of_one_run(), first);
}

TEST(Engine, AnErrorOfAnAbortCallbackKeepsNothingFromBeingAborted) {
  const Tensor a = leaf({2}, 1), b = leaf({2}, 2);
  backward(sum(a));
  int aborted = 0;
  std::vector<HookHandle> handles;
  for (const Tensor& x : {a, b}) {
    handles.push_back(on_gradient_ready(x, [&](const Tensor&) {
      const auto on_end = [] { throw std::runtime_error("the run's"); };
      on_backward_end(on_end, [&](const std::string& error) {
        EXPECT_EQ(error, "the run's");
        ++aborted;
        throw std::runtime_error("the callback's");
      });
    }));
  }
  log::set_level(log::Level::off);
  EXPECT_EQ(error_of<std::runtime_error>([&] { backward(sum(a + b)); }), "the run's");
  log::set_level(log::Level::info);
  EXPECT_EQ(aborted, 2);
  EXPECT_EQ(a.gradient_slot().state(), core::GradientSlot::State::broken);
  EXPECT_EQ(b.gradient_slot().state(), core::GradientSlot::State::empty);
}

TEST(Engine, ABackwardInsideAHookIsAPassOfItsOwn) {
  const Tensor a = leaf({1}, 1), b = leaf({1}, 2);
  const HookHandle handle = on_gradient_ready(a, [&](const Tensor&) {
    const GradModeGuard record(true);
    backward(b * b);
    EXPECT_TRUE(in_backward());
  });
  backward(a * a);
  expect_close(b.grad(), {2 * b.item()}, 1e-12);
  expect_close(a.grad(), {2 * a.item()}, 1e-12);
}

TEST(Engine, RunsFromAnotherThread) {
  const Tensor x = leaf({3}, 1);
  const Tensor y = sum(x * x);
  std::thread([&] { backward(y); }).join();
  std::vector<double> expected;
  for (double v : x.to_vector()) expected.push_back(2 * v);
  expect_close(x.grad(), expected, 1e-12);
}

TEST(Engine, ALeafMayGoBeforeItsGraph) {
  Tensor y;
  {
    const Tensor x = leaf({2}, 1);
    y = sum(x * x);
  }
  backward(y);
  SUCCEED();
}

TEST(Engine, AnUnusedBranchLeavesItsLeafAlone) {
  const Tensor a = leaf({2}, 1), b = leaf({2}, 2);
  int fired = 0;
  const HookHandle handle = on_gradient_ready(b, [&](const Tensor&) { ++fired; });
  const Tensor unused = b * b;
  backward(sum(a * a));
  EXPECT_FALSE(b.grad().defined());
  EXPECT_EQ(fired, 0);
}

// ---- arena slots

// A leaf whose gradient is a slice of `arena`.
Tensor leaf_with_slot(const Tensor& arena, std::int64_t begin, const Shape& shape, DType dtype,
                      unsigned seed) {
  Tensor x = leaf(shape, seed, -1, 1, dtype);
  x.gradient_slot().place(
      arena.alias(arena.view().slice(0, begin, begin + shape.numel()).reshape(shape)));
  return x;
}

TEST(Slots, TheFirstContributionOverwritesAndLaterOnesAdd) {
  const Tensor arena = Tensor::full({4}, 77.0, DType::f32);
  Tensor x = leaf_with_slot(arena, 1, {2}, DType::f32, 1);
  const void* place = x.gradient_slot().memory().raw_data();
  EXPECT_FALSE(x.grad().defined());
  const auto step = [&] { backward(sum(x * 3.0)); };
  step();
  expect_close(arena, {77, 3, 3, 77}, 1e-6);
  step();
  expect_close(arena, {77, 6, 6, 77}, 1e-6);
  EXPECT_EQ(x.grad().raw_data(), place);
  x.clear_grad();
  EXPECT_FALSE(x.grad().defined());
  step();
  expect_close(arena, {77, 3, 3, 77}, 1e-6);
}

TEST(Slots, AMatrixProductWritesItsWeightGradientInPlace) {
  const Tensor arena = Tensor::full({6}, 77.0, DType::f32);
  const Tensor w = leaf_with_slot(arena, 0, {2, 3}, DType::f32, 1);
  const Tensor x = testing::random_tensor({4, 3}, 2, -1, 1, DType::f32);
  std::vector<double> column(3, 0.0);
  const std::vector<double> values = x.to_vector();
  for (std::size_t i = 0; i < values.size(); ++i) column[i % 3] += values[i];
  std::vector<double> expected;
  for (int repeat = 1; repeat <= 2; ++repeat) {
    backward(sum(linear(x, w)));
    expected.clear();
    for (int row = 0; row < 2; ++row) {
      for (double c : column) expected.push_back(repeat * c);
    }
    expect_close(arena, expected, 1e-5);
  }
}

TEST(Slots, TiedContributionsAddUpInTheSlot) {
  const Tensor arena = Tensor::full({4}, 77.0, DType::f32);
  const Tensor w = leaf_with_slot(arena, 0, {2, 2}, DType::f32, 1);
  int fired = 0;
  const HookHandle handle = on_gradient_ready(w, [&](const Tensor&) { ++fired; });
  backward(sum(matmul(w, w)));
  EXPECT_EQ(fired, 1);
  const std::vector<double> v = w.to_vector();
  const double r0 = v[0] + v[1], r1 = v[2] + v[3], c0 = v[0] + v[2], c1 = v[1] + v[3];
  expect_close(arena, {r0 + c0, r1 + c0, r0 + c1, r1 + c1}, 1e-5);
}

TEST(Slots, AHalfLeafMayHaveAnF32Slot) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor arena = Tensor::zeros({2}, DType::f32);
    const Tensor x = leaf_with_slot(arena, 0, {2}, dtype, 1);
    const Tensor w = testing::random_tensor({2}, 2, -1, 1, dtype);
    backward(sum(x * w));
    EXPECT_EQ(x.grad().dtype(), DType::f32);
    expect_close(x.grad(), w.to_vector(), 1e-6);
  }
}

}  // namespace
}  // namespace cairn::autograd
