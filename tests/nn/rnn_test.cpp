// Recurrent layers and cells against PyTorch, and what they do in an autocast region.
#include "cairn/nn/rnn.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "support/golden.h"

namespace cairn::nn {
namespace {

constexpr double kTolerance = 2e-6;

const test::Golden& rnn_values() {
  static const test::Golden values("rnn");
  return values;
}

void expect_golden(const Tensor& got, const std::string& name) {
  ASSERT_TRUE(got.defined()) << name;
  ASSERT_EQ(got.shape(), rnn_values().shape(name)) << name;
  const std::vector<double>& expected = rnn_values().values(name);
  const std::vector<double> values = got.to_vector();
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], kTolerance * (1 + std::abs(expected[i])))
        << name << " " << i;
  }
}

void take_rnn_parameters(Module& model, const std::string& name) {
  for (const NamedTensor& entry : model.parameters()) {
    const Tensor value = rnn_values().tensor(name + ".parameter." + entry.name);
    ASSERT_EQ(value.shape(), entry.tensor.shape()) << entry.name;
    kernels::copy(value, entry.tensor);
  }
}

Tensor leaf(const std::string& name) {
  return rnn_values().contains(name) ? rnn_values().tensor(name).set_requires_grad(true) : Tensor();
}

Tensor weighted(const Tensor& x, const std::string& weights) {
  return autograd::sum(x * rnn_values().tensor(weights));
}

void check_gradients(Module& model, const std::string& name, const Tensor& loss, const Tensor& x,
                     const RnnState& initial) {
  autograd::backward(loss);
  expect_golden(x.grad(), name + ".dx");
  expect_golden(initial.h.grad(), name + ".dh0");
  if (initial.c.defined()) expect_golden(initial.c.grad(), name + ".dc0");
  for (const NamedTensor& entry : model.parameters()) {
    expect_golden(entry.tensor.grad(), name + ".gradient." + entry.name);
  }
}

void check_layer(Recurrent& model, const std::string& name,
                 const std::vector<std::int64_t>& lengths = {}) {
  SCOPED_TRACE(name);
  take_rnn_parameters(model, name);
  const Tensor x = leaf(name + ".x");
  const RnnState initial{leaf(name + ".h0"), leaf(name + ".c0")};
  const RnnOutput out = model.run(x, initial, lengths);
  expect_golden(out.y, name + ".y");
  expect_golden(out.state.h, name + ".h");
  Tensor loss = weighted(out.y, name + ".wy") + weighted(out.state.h, name + ".wh");
  EXPECT_EQ(out.state.c.defined(), rnn_values().contains(name + ".c"));
  if (out.state.c.defined()) {
    expect_golden(out.state.c, name + ".c");
    loss = loss + weighted(out.state.c, name + ".wh");
  }
  check_gradients(model, name, loss, x, initial);
}

template <class Layer>
void check_layers(const std::string& kind) {
  Layer one(5, 4), two(5, 4, {.layers = 2}), both(5, 4, {.layers = 2, .bidirectional = true});
  check_layer(one, kind + "_1");
  check_layer(two, kind + "_2");
  check_layer(both, kind + "_2_bi");
  Layer packed(5, 4, {.layers = 2, .bidirectional = true});
  check_layer(packed, kind + "_2_bi_packed", {6, 4, 1});
}

TEST(Rnn, IsPyTorchs) {
  check_layers<RNN>("rnn");
  RNN relu(5, 4, {.relu = true});
  check_layer(relu, "rnn_relu");
}
TEST(Gru, IsPyTorchs) {
  check_layers<GRU>("gru");
}
TEST(Lstm, IsPyTorchs) {
  check_layers<LSTM>("lstm");
  LSTM plain(5, 4, {.bias = false});
  check_layer(plain, "lstm_plain");
}

void check_cell(RecurrentCell& cell, const std::string& name) {
  SCOPED_TRACE(name);
  take_rnn_parameters(cell, name);
  const Tensor x = leaf(name + ".x");
  const RnnState initial{leaf(name + ".h0"), leaf(name + ".c0")};
  const RnnState out = cell.step(x, initial);
  expect_golden(out.h, name + ".h");
  Tensor loss = weighted(out.h, name + ".wh");
  if (out.c.defined()) {
    expect_golden(out.c, name + ".c");
    loss = loss + weighted(out.c, name + ".wh");
  }
  check_gradients(cell, name, loss, x, initial);
}

TEST(RecurrentCells, ArePyTorchs) {
  RNNCell rnn(5, 4), relu(5, 4, {.relu = true});
  GRUCell gru(5, 4);
  LSTMCell lstm(5, 4);
  check_cell(rnn, "rnn_cell");
  check_cell(relu, "rnn_relu_cell");
  check_cell(gru, "gru_cell");
  check_cell(lstm, "lstm_cell");
}

TEST(Recurrent, StartsFromZerosAndIsAModule) {
  manual_seed(3);
  LSTM lstm(3, 2, {.layers = 2, .bidirectional = true});
  const Tensor x = Tensor::full({4, 2, 3}, 0.5), zeros = Tensor::zeros({4, 2, 2});
  EXPECT_EQ(lstm(x).to_vector(), lstm.run(x, {zeros, zeros}).y.to_vector());
  EXPECT_EQ(lstm.clone()->forward(x).to_vector(), lstm(x).to_vector());
  EXPECT_EQ(lstm.parameters()[4].name, "weight_ih_l0_reverse");
  EXPECT_EQ(lstm.parameters().size(), 16u);
  for (const double value : lstm.parameters()[0].tensor.to_vector())
    EXPECT_LE(std::abs(value), 0.70711);
  for (const std::shared_ptr<Module>& cell :
       {std::shared_ptr<Module>(std::make_shared<GRUCell>(3, 2)),
        std::shared_ptr<Module>(std::make_shared<RNNCell>(3, 2)),
        std::shared_ptr<Module>(std::make_shared<LSTMCell>(3, 2))}) {
    const Tensor row = Tensor::full({2, 3}, 0.5);
    EXPECT_EQ(cell->clone()->forward(row).to_vector(), (*cell)(row).to_vector());
  }
}

TEST(Recurrent, SequencesOfNoLengthKeepTheirState) {
  GRU gru(3, 2);
  const Tensor h = Tensor::full({1, 2, 2}, 0.25);
  const RnnOutput out = gru.run(Tensor::full({3, 2, 3}, 1.0), {h, {}}, {0, 3});
  const std::vector<double> y = out.y.to_vector(), last = out.state.h.to_vector();
  for (const std::size_t i : {0u, 1u, 4u, 5u, 8u, 9u}) EXPECT_EQ(y[i], 0.0);
  EXPECT_EQ(last[0], 0.25);
  EXPECT_EQ(last[2], y[10]);
}

TEST(Recurrent, RunsInHalfUnderAutocast) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    LSTM lstm(8, 8, {.layers = 2, .bidirectional = true});
    const Tensor x = Tensor::full({3, 2, 8}, 0.5).set_requires_grad(true);
    RnnOutput out;
    const Tensor exact = lstm(x).detach();
    {
      const autograd::AutocastGuard autocast(true, dtype);
      out = lstm.run(x, {Tensor::zeros({4, 2, 8}), Tensor::zeros({4, 2, 8})}, {3, 2});
    }
    EXPECT_EQ(out.y.dtype(), dtype);
    EXPECT_EQ(out.state.h.dtype(), dtype);
    EXPECT_EQ(out.state.c.dtype(), dtype);
    const std::vector<double> half = out.y.to_vector(), full = exact.to_vector();
    const double tolerance = dtype == DType::f16 ? 2e-3 : 2e-2;
    for (std::size_t i = 0; i < 16; ++i) EXPECT_NEAR(half[i], full[i], 4 * tolerance);
    autograd::backward(autograd::sum(out.y));
    EXPECT_EQ(x.grad().dtype(), DType::f32);
    EXPECT_EQ(lstm.parameters()[0].tensor.grad().dtype(), DType::f32);
  }
}

TEST(Recurrent, NamesWhatDoesNotFit) {
  GRU gru(3, 2);
  const auto message_of = [](auto f) {
    try {
      f();
    } catch (const core::InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  using ::testing::HasSubstr;
  const Tensor x = Tensor::zeros({4, 2, 3});
  EXPECT_THAT(message_of([&] { gru(Tensor::zeros({4, 2, 5})); }), HasSubstr("[4, 2, 5]"));
  EXPECT_THAT(message_of([&] {
                gru.run(x, {Tensor::zeros({2, 2, 2}), {}});
              }),
              HasSubstr("[1, 2, 2]"));
  EXPECT_THAT(message_of([&] { gru.run(x, {{}, Tensor::zeros({1, 2, 2})}); }), HasSubstr("LSTM"));
  EXPECT_THAT(message_of([&] { gru.run(x, {}, {4}); }), HasSubstr("2 lengths"));
  EXPECT_THAT(message_of([&] { gru.run(x, {}, {4, 5}); }), HasSubstr("got 5"));
  EXPECT_THAT(message_of([] { GRU(0, 2); }), HasSubstr("positive"));
}

}  // namespace
}  // namespace cairn::nn
