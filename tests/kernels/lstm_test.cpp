// The cells of an LSTM against a naive reading of the formulas, in double. The loops need a
// product, which the emulator does not have: tests/autograd/lstm_test.cpp has them.
#include "cairn/kernels/lstm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::random_tensor;
using ::testing::HasSubstr;

class Lstm : public ::testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, Lstm, ::testing::ValuesIn(test::devices()), test::device_name);

DType wide(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

struct LstmCase {
  std::int64_t B, H;
  DType dtype;
  std::vector<std::int64_t> lengths;
  std::int64_t t = 2;

  bool inside(std::int64_t b) const {
    return lengths.empty() || t < lengths[static_cast<std::size_t>(b)];
  }
  LstmStep step(Tensor& holder, Device device) const {
    if (!lengths.empty()) holder = Tensor::from(lengths, {B}, DType::i64, device);
    return {lengths.empty() ? TensorView() : holder.view(), t};
  }
  std::string text() const {
    return core::str(B, " x ", H, " ", core::name(dtype), lengths.empty() ? "" : " lengths");
  }
};

/// 1 to 5 sequences of up to 70 units: none, some and whole packs and vectors, with a rest or not.
LstmCase drawn(std::mt19937& draw) {
  const DType dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
  LstmCase c{1 + static_cast<std::int64_t>(draw() % 5),
             1 + static_cast<std::int64_t>(draw() % 70),
             dtypes[draw() % 4],
             {}};
  if (draw() % 3 == 0) c.H = 16 * (1 + c.H / 16);
  for (std::int64_t b = 0; draw() % 2 == 0 && b < c.B; ++b) {
    c.lengths.push_back(static_cast<std::int64_t>(draw() % 5));
  }
  c.lengths.resize(c.lengths.empty() ? 0 : static_cast<std::size_t>(c.B), 5);
  return c;
}

TEST_P(Lstm, CellIsItsFormula) {
  std::mt19937 draw(4);
  for (int trial = 0; trial < 60; ++trial) {
    const LstmCase c = drawn(draw);
    SCOPED_TRACE(c.text());
    const Shape state{c.B, c.H}, all{c.B, 4 * c.H};
    const Tensor gates = random_tensor(all, c.dtype, GetParam(), draw(), -3, 3);
    const Tensor hidden = random_tensor(all, wide(c.dtype), GetParam(), draw(), -3, 3);
    const Tensor carry = random_tensor(state, wide(c.dtype), GetParam(), draw(), -2, 2);
    const Tensor before = random_tensor(state, c.dtype, GetParam(), draw());
    const Tensor h = Tensor::empty(state, c.dtype, GetParam());
    const Tensor rounded = Tensor::empty(state, c.dtype, GetParam());
    const auto x = gates.to_vector<double>(), y = hidden.to_vector<double>(),
               c_before = carry.to_vector<double>(), h_before = before.to_vector<double>();
    std::vector<double> activations = x, cells = c_before, results = h_before;
    for (std::int64_t k = 0; k < c.B * c.H; ++k) {
      const std::int64_t b = k / c.H;
      if (!c.inside(b)) continue;
      double a[4];
      for (std::int64_t gate = 0; gate < 4; ++gate) {
        const auto i = static_cast<std::size_t>((4 * b + gate) * c.H + k % c.H);
        a[gate] = gate == 2 ? std::tanh(x[i] + y[i]) : sigmoid(x[i] + y[i]);
        activations[i] = a[gate];
      }
      const auto i = static_cast<std::size_t>(k);
      cells[i] = a[1] * c_before[i] + a[0] * a[2];
      results[i] = a[3] * std::tanh(cells[i]);
    }
    Tensor holder;
    lstm_cell(gates, hidden, carry, before, h, rounded, c.step(holder, GetParam()));
    const double rough = 2 * epsilon(c.dtype), fine = 2 * epsilon(wide(c.dtype));
    expect_close(gates, activations, rough, 8 * fine, "gates");
    expect_close(carry, cells, 4 * fine, 8 * fine, "carry");
    expect_close(rounded, cells, rough, 8 * fine, "c");
    expect_close(h, results, rough, 8 * fine, "h");
    if (HasFailure()) return;
  }
}

TEST_P(Lstm, CellBackwardIsTheDerivative) {
  std::mt19937 draw(5);
  for (int trial = 0; trial < 60; ++trial) {
    const LstmCase c = drawn(draw);
    SCOPED_TRACE(c.text());
    const Shape state{c.B, c.H}, all{c.B, 4 * c.H};
    const auto tensor = [&](const Shape& shape, DType dtype, double low, double high) {
      return random_tensor(shape, dtype, GetParam(), draw(), low, high);
    };
    const Tensor gates = tensor(all, c.dtype, 0.01, 0.99), before = tensor(state, c.dtype, -2, 2),
                 after = tensor(state, c.dtype, -2, 2), dy = tensor(state, c.dtype, -1, 1),
                 dh = tensor(state, wide(c.dtype), -1, 1), dc = tensor(state, wide(c.dtype), -1, 1);
    const auto a = gates.to_vector<double>(), c0 = before.to_vector<double>(),
               c1 = after.to_vector<double>(), d = dy.to_vector<double>();
    std::vector<double> dgates(a.size()), left = dh.to_vector<double>(),
                                          dc0 = dc.to_vector<double>();
    for (std::size_t k = 0; k < left.size(); ++k) {
      const auto b = static_cast<std::int64_t>(k) / c.H;
      const double gradient = left[k] + d[k];
      left[k] = c.inside(b) ? 0.0 : gradient;
      if (!c.inside(b)) continue;
      const auto H = static_cast<std::size_t>(c.H);
      const std::size_t first = 4 * static_cast<std::size_t>(b) * H + k % H;
      const double i = a[first], f = a[first + H], g = a[first + 2 * H], o = a[first + 3 * H];
      const double squashed = std::tanh(c1[k]);
      const double total = dc0[k] + gradient * o * (1 - squashed * squashed);
      dgates[first] = total * g * i * (1 - i);
      dgates[first + H] = total * c0[k] * f * (1 - f);
      dgates[first + 2 * H] = total * i * (1 - g * g);
      dgates[first + 3 * H] = gradient * squashed * o * (1 - o);
      dc0[k] = total * f;
    }
    Tensor holder;
    lstm_cell_backward(gates, before, after, dy, dh, dc, c.step(holder, GetParam()));
    const double rough = 2 * epsilon(c.dtype), fine = 8 * epsilon(wide(c.dtype));
    expect_close(gates, dgates, rough, fine + (c.dtype == DType::f16 ? 0x1p-24 : 0), "gates");
    expect_close(dh, left, fine, fine, "dh");
    expect_close(dc, dc0, fine, fine, "dc");
    if (HasFailure()) return;
  }
}

// What a step may read of a row that another step wrote lies where packs do not start.
TEST_P(Lstm, CellTakesRowsAtAnyAddress) {
  const auto at_odd_address = [&](const Shape& shape, std::uint64_t seed) {
    const Tensor memory = random_tensor({shape.numel() + 1}, DType::f32, GetParam(), seed);
    return memory.alias(memory.view().slice(0, 1, shape.numel() + 1).reshape(shape));
  };
  const auto copy_of = [&](const Tensor& x) {
    return Tensor::from(x.to_vector<double>(), x.shape(), x.dtype(), GetParam());
  };
  const Tensor gates = at_odd_address({2, 64}, 1), hidden = at_odd_address({2, 64}, 2),
               carry = at_odd_address({2, 16}, 3), before = at_odd_address({2, 16}, 4),
               h = at_odd_address({2, 16}, 5), c = at_odd_address({2, 16}, 6);
  const Tensor gates2 = copy_of(gates), carry2 = copy_of(carry), h2 = copy_of(h), c2 = copy_of(c);
  lstm_cell(gates, hidden, carry, before, h, c);
  lstm_cell(gates2, copy_of(hidden), carry2, copy_of(before), h2, c2);
  EXPECT_EQ(gates.to_vector<double>(), gates2.to_vector<double>());
  EXPECT_EQ(h.to_vector<double>(), h2.to_vector<double>());
  EXPECT_EQ(c.to_vector<double>(), c2.to_vector<double>());
  lstm_cell_backward(gates, before, c, h, carry, at_odd_address({2, 16}, 7));
  lstm_cell_backward(gates2, copy_of(before), c2, h2, carry2, copy_of(at_odd_address({2, 16}, 7)));
  EXPECT_EQ(gates.to_vector<double>(), gates2.to_vector<double>());
  EXPECT_EQ(carry.to_vector<double>(), carry2.to_vector<double>());
}

TEST_P(Lstm, SaysWhatDoesNotFit) {
  const auto f32 = [&](const Shape& shape) { return Tensor::zeros(shape, DType::f32, GetParam()); };
  const Tensor gates = f32({2, 12}), state = f32({2, 3});
  const auto cell = [&](const Tensor& g, const Tensor& hidden, const LstmStep& step = {}) {
    return message_of([&] { lstm_cell(g, hidden, state, state, state, state, step); });
  };
  EXPECT_THAT(cell(f32({2, 10}), gates), HasSubstr("i f g o"));
  EXPECT_THAT(cell(gates, f32({2, 11})), HasSubstr("expected hidden of shape [2, 12]"));
  EXPECT_THAT(cell(gates, Tensor::zeros({2, 12}, DType::f64, GetParam())),
              HasSubstr("hidden of dtype f32"));
  const Tensor three = Tensor::zeros({3}, DType::i64, GetParam());
  EXPECT_THAT(cell(gates, gates, {three, 0}), HasSubstr("lengths of shape [2]"));
  const Tensor wide_state = f32({2, 6});
  const Tensor strided = wide_state.alias(wide_state.view().slice(1, 0, 3));
  EXPECT_THAT(message_of([&] { lstm_cell_backward(gates, strided, state, state, state, state); }),
              HasSubstr("contiguous c_before"));

  const Tensor steps = f32({5, 2, 12}), weight = f32({12, 3}), states = f32({6, 2, 3});
  EXPECT_THAT(message_of([&] {
                lstm(steps, f32({12, 4}), states, states);
              }),
              HasSubstr("weight of shape [12, 3]"));
  EXPECT_THAT(message_of([&] {
                lstm(steps, weight, f32({5, 2, 3}), states);
              }),
              HasSubstr("expected h of shape [6, 2, 3]"));
  EXPECT_THAT(message_of([&] { lstm_backward(steps, weight, states, states, states, state); }),
              HasSubstr("expected dh of shape [2, 3]"));
}

}  // namespace
}  // namespace cairn::kernels
