// lstm against the operations that it is made of, step by step, in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "cairn/autograd/autocast.h"
#include "cairn/autograd/observer.h"
#include "cairn/autograd/ops.h"
#include "gradient_check.h"
#include "support/near.h"

namespace cairn::autograd {
namespace {

using test::expect_near_largest;
using testing::check_gradients;
using testing::error_of;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;
using testing::strided_leaf;

/// x, ih, hh, bias ih, bias hh, h, c.
constexpr std::size_t kInputs = 7;

LstmResult run(const Tensors& in, const Tensor& lengths = {}, bool reverse = false) {
  return lstm(in[0], {in[1], in[2], in[3], in[4]}, {in[5], in[6], lengths, reverse});
}

/// Everything that came out as one vector.
Tensor flat(const LstmResult& result) {
  return concat({reshape(result.y, {-1}), reshape(result.h, {-1}), reshape(result.c, {-1})});
}

Tensor row(const Tensor& x, std::int64_t t) {
  return reshape(slice(x, 0, t, t + 1), Shape(x.shape().begin() + 1, x.shape().end()));
}

LstmResult composed(const Tensors& in, const std::vector<std::int64_t>& lengths, bool reverse) {
  const std::int64_t T = in[0].size(0), B = in[0].size(1), H = in[2].size(1);
  const auto state = [&](const Tensor& x) {
    return x.defined() ? x : Tensor::zeros({B, H}, in[0].dtype());
  };
  LstmResult now{{}, state(in[5]), state(in[6])};
  Tensors results(static_cast<std::size_t>(T));
  for (std::int64_t i = 0; i < T; ++i) {
    const std::int64_t t = reverse ? T - 1 - i : i;
    const Tensor a = linear(row(in[0], t), in[1], in[3]) + linear(now.h, in[2], in[4]);
    const auto gate = [&](std::int64_t k) { return slice(a, 1, k * H, (k + 1) * H); };
    const Tensor c = sigmoid(gate(1)) * now.c + sigmoid(gate(0)) * tanh(gate(2));
    const Tensor h = sigmoid(gate(3)) * tanh(c);
    std::vector<double> inside(static_cast<std::size_t>(B), 1.0);
    for (std::size_t b = 0; b < lengths.size(); ++b) inside[b] = t < lengths[b] ? 1.0 : 0.0;
    const Tensor mask = Tensor::from(inside, {B, 1}, in[0].dtype());
    now.h = mask * h + (mask * -1.0 + 1.0) * now.h;
    now.c = mask * c + (mask * -1.0 + 1.0) * now.c;
    results[static_cast<std::size_t>(t)] = now.h;
  }
  now.y = stack(results);
  return now;
}

Tensor lengths_tensor(const std::vector<std::int64_t>& lengths) {
  if (lengths.empty()) return {};
  return Tensor::from(lengths, {static_cast<std::int64_t>(lengths.size())}, DType::i64);
}

Tensors leaves(std::int64_t T, std::int64_t B, std::int64_t I, std::int64_t H, unsigned seed,
               DType dtype = DType::f64) {
  const auto make = [&](const Shape& shape) { return leaf(shape, seed++, -1, 1, dtype); };
  return {make({T, B, I}), make({4 * H, I}), make({4 * H, H}), make({4 * H}),
          make({4 * H}),   make({B, H}),     make({B, H})};
}

TEST(Lstm, HasTheGradientsOfItsFormula) {
  for (const bool reverse : {false, true}) {
    for (const std::vector<std::int64_t>& lengths :
         {std::vector<std::int64_t>{}, std::vector<std::int64_t>{2, 0, 3}}) {
      const auto f = [&](const Tensors& in) {
        return flat(run(in, lengths_tensor(lengths), reverse));
      };
      check_gradients(f, leaves(3, 3, 2, 3, 1));
      Tensors few = leaves(3, 3, 2, 3, 2);
      few[0] = strided_leaf({3, 3, 2}, 5);
      few[2] = strided_leaf({12, 3}, 6);
      few[4] = few[5] = Tensor();
      check_gradients(f, few);
    }
  }
}

std::vector<double> gradient_of(const Tensor& x) {
  const Tensor gradient = x.grad();
  std::vector<double> values = gradient.defined() ? gradient.to_vector() : std::vector<double>();
  x.gradient_slot().clear();
  return values;
}

// Sizes, dtypes, lengths, which inputs there are and which want a gradient, as drawn; the reference
// computes in double from the same values.
TEST(Lstm, IsItsComposition) {
  static constexpr const char* kNames[] = {"dx", "dih", "dhh", "dbias ih", "dbias hh", "dh", "dc"};
  std::mt19937 draw(11);
  const auto below = [&](unsigned n) { return static_cast<std::int64_t>(draw() % n); };
  for (int i = 0; i < 60; ++i) {
    const std::int64_t T = 1 + below(6), B = below(8) == 0 ? 0 : 1 + below(5), I = 1 + below(9),
                       H = below(3) == 0 ? 16 * (1 + below(3)) : 1 + below(20);
    const DType dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
    const DType dtype = dtypes[below(4)];
    const bool reverse = below(2) == 0;
    std::vector<std::int64_t> lengths;
    const bool cut = below(2) == 0;
    for (std::int64_t b = 0; cut && b < B; ++b) {
      lengths.push_back(below(static_cast<unsigned>(T + 1)));
    }
    Tensors in = leaves(T, B, I, H, static_cast<unsigned>(draw()), dtype), exact(kInputs);
    for (std::size_t k = 3; k < kInputs; ++k) {
      if (below(3) == 0) in[k] = Tensor();
    }
    const auto wanted = static_cast<std::size_t>(below(kInputs));
    for (std::size_t k = 0; k < kInputs; ++k) {
      if (!in[k].defined()) continue;
      in[k].set_requires_grad(below(4) != 0 || k == wanted % 3);
      exact[k] = Tensor::from(in[k].to_vector(), in[k].shape(), DType::f64)
                     .set_requires_grad(in[k].requires_grad());
    }
    SCOPED_TRACE(core::str("T ", T, " B ", B, " I ", I, " H ", H, " ", core::name(dtype),
                           reverse ? " reverse" : "", cut ? " lengths" : ""));
    const Tensor expected = flat(composed(exact, lengths, reverse));
    const Tensor got = flat(run(in, lengths_tensor(lengths), reverse));
    const std::vector<double> weights =
        testing::random_values(expected.numel(), static_cast<unsigned>(i));
    backward(expected, Tensor::from(weights, expected.shape(), DType::f64));
    backward(got, Tensor::from(weights, got.shape(), dtype));
    const double tolerance = dtype == DType::f64    ? 1e-12
                             : dtype == DType::f32  ? 1e-5
                             : dtype == DType::bf16 ? 6e-2
                                                    : 5e-3;
    EXPECT_EQ(got.dtype(), dtype);
    expect_near_largest(got.to_vector(), expected.to_vector(), tolerance, 0.25, "result");
    for (std::size_t k = 0; k < kInputs; ++k) {
      if (!in[k].defined() || !in[k].requires_grad()) continue;
      expect_near_largest(gradient_of(in[k]), gradient_of(exact[k]), tolerance, 0.25, kNames[k]);
    }
    if (HasFatalFailure()) return;
  }
}

TEST(Lstm, GradientsAddUpAndAGraphThatIsKeptGivesThemAgain) {
  const Tensors in = leaves(4, 2, 3, 5, 3, DType::f32);
  const Tensor loss = sum(flat(run(in)));
  backward(loss, {}, {.retain_graph = true});
  std::vector<std::vector<double>> once;
  for (const Tensor& x : in) once.push_back(x.grad().to_vector());
  backward(loss);
  for (std::size_t k = 0; k < in.size(); ++k) {
    const std::vector<double> twice = in[k].grad().to_vector();
    for (std::size_t i = 0; i < twice.size(); ++i) {
      ASSERT_NEAR(twice[i], 2 * once[k][i], 1e-5 * (1 + std::abs(twice[i]))) << k << " " << i;
    }
  }
  EXPECT_THAT(error_of<core::Error>([&] { backward(loss); }), HasSubstr("released"));
}

TEST(Lstm, ResultsThatNobodyUsesHaveNoGradient) {
  const Tensors in = leaves(3, 2, 3, 4, 4);
  backward(sum(run(in).c));
  std::vector<double> expected;
  for (const Tensor& x : in) expected.push_back(sum(x.grad()).to_vector()[0]);
  for (const Tensor& x : in) x.gradient_slot().clear();
  backward(sum(composed(in, {}, false).c));
  for (std::size_t k = 0; k < in.size(); ++k) {
    EXPECT_NEAR(sum(in[k].grad()).to_vector()[0], expected[k], 1e-10);
  }
}

// The cell gains 2^-9 in each of 400 steps: from 1 on, that is less than bf16's next number.
TEST(Lstm, CarriesTheCellInF32) {
  constexpr std::int64_t T = 400;
  const double open = 30.0, small = std::atanh(0x1p-9);
  const Tensor x = Tensor::zeros({T, 1, 1}, DType::bf16);
  const Tensor bias = Tensor::from(std::vector<double>{open, open, small, open}, {4}, DType::bf16);
  const Tensor ih = Tensor::zeros({4, 1}, DType::bf16), hh = Tensor::zeros({4, 1}, DType::bf16);
  const LstmResult result =
      lstm(x, {ih, hh, bias, {}}, {{}, Tensor::full({1, 1}, 1.0, DType::bf16), {}, false});
  EXPECT_NEAR(result.c.to_vector()[0], 1.0 + T * 0x1p-9, 0.01);
}

TEST(Lstm, KeepsInputGatesAndStates) {
  struct Saved : OpObserver {
    std::int64_t bytes = 0;
    void begin(const OpEvent&) override {}
    void end(const OpEvent& event) override {
      if (std::string_view(event.name) == "lstm") bytes = event.bytes_saved;
    }
  } saved;
  const std::int64_t T = 7, B = 3, I = 5, H = 4;
  Tensors in = leaves(T, B, I, H, 5, DType::bf16);
  in[0] = in[0] * 1.0;  // not a leaf, which counts as a parameter
  OpObserver* const before = set_observer(&saved);
  run(in);
  set_observer(before);
  // x, the gates, h with the initial one and the last c, c with the initial one.
  EXPECT_EQ(saved.bytes, 2 * B * (T * (I + 4 * H) + (T + 2) * H + (T + 1) * H));
}

TEST(Lstm, IsHalfUnderAutocast) {
  Tensors in = leaves(4, 2, 3, 5, 6, DType::f32);
  const Tensor exact = flat(run(in));
  Tensor half;
  {
    const AutocastGuard autocast(true, DType::bf16);
    half = flat(run(in, lengths_tensor({4, 4})));
  }
  EXPECT_EQ(half.dtype(), DType::bf16);
  expect_near_largest(half.to_vector(), exact.to_vector(), 2e-2, 0.25, "result");
  backward(sum(half));
  for (const Tensor& x : in) EXPECT_EQ(x.grad().dtype(), DType::f32);
}

TEST(Lstm, SaysWhatDoesNotFit) {
  const Tensors in = leaves(3, 2, 4, 5, 7, DType::f32);
  const auto with = [&](std::size_t k, const Tensor& x) {
    Tensors other = in;
    other[k] = x;
    return error_of([&] { run(other); });
  };
  EXPECT_THAT(with(0, Tensor::zeros({3, 4})), HasSubstr("expected x [T, B, I]"));
  EXPECT_THAT(with(0, Tensor::zeros({0, 2, 4})), HasSubstr("T >= 1"));
  EXPECT_THAT(with(1, Tensor::zeros({20, 3})), HasSubstr("expected weight ih [20, 4]"));
  EXPECT_THAT(with(2, Tensor::zeros({20, 4})), HasSubstr("expected weight hh [4 H, H]"));
  EXPECT_THAT(with(2, {}), HasSubstr("none"));
  EXPECT_THAT(with(3, Tensor::zeros({5})), HasSubstr("expected bias ih [20]"));
  EXPECT_THAT(with(5, Tensor::zeros({2, 4})), HasSubstr("expected h [2, 5]"));
  EXPECT_THAT(with(6, Tensor::zeros({2, 5}, DType::f64)), HasSubstr("expected c [2, 5] f32"));
  EXPECT_THAT(error_of([&] {
                run(in, lengths_tensor({1, 2, 3}));
              }),
              HasSubstr("expected lengths [2]"));
}

}  // namespace
}  // namespace cairn::autograd
