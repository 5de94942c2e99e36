#include "cairn/nn/rnn.h"

#include <cmath>

#include "cairn/autograd/ops.h"
#include "cairn/core/memory.h"
#include "cairn/nn/init.h"

namespace cairn::nn {

namespace {

std::int64_t gates_of(RnnKind kind) {
  switch (kind) {
    case RnnKind::rnn_tanh:
    case RnnKind::rnn_relu:
      return 1;
    case RnnKind::gru:
      return 3;
    case RnnKind::lstm:
      return 4;
  }
  return 1;
}

Tensor gate(const Tensor& all, std::int64_t index, std::int64_t hidden) {
  return autograd::slice(all, -1, index * hidden, (index + 1) * hidden);
}

// r = s(xr + hr), z = s(xz + hz), n = tanh(xn + r hn), h' = n + z (h - n).
Tensor gru_step(const Tensor& x, const Tensor& hidden, const Tensor& h) {
  const std::int64_t H = h.size(-1);
  const Tensor r = autograd::sigmoid(gate(x, 0, H) + gate(hidden, 0, H));
  const Tensor z = autograd::sigmoid(gate(x, 1, H) + gate(hidden, 1, H));
  const Tensor n = autograd::tanh(gate(x, 2, H) + r * gate(hidden, 2, H));
  return n + z * (h - n);
}

// One step of an RNN or a GRU from the input's projection x [B, G H] and the state's.
Tensor step_of(RnnKind kind, const Tensor& x, const Tensor& hidden, const Tensor& h) {
  if (kind == RnnKind::gru) return gru_step(x, hidden, h);
  return kind == RnnKind::rnn_relu ? autograd::add_relu(x, hidden) : autograd::tanh(x + hidden);
}

// The state in x's dtype, zeros where there is none.
Tensor state_like(const Tensor& state, const Tensor& x, std::int64_t hidden) {
  if (state.defined()) return autograd::to(state, x.dtype());
  return Tensor::zeros({x.size(-2), hidden}, x.dtype(), x.device());
}

Tensor in_dtype(const Tensor& x, DType dtype) {
  return x.defined() ? autograd::to(x, dtype) : x;
}

void check_state(const char* what, const Tensor& state, const Shape& shape, RnnKind kind) {
  const bool fits = !state.defined() || state.shape() == shape;
  CAIRN_CHECK(fits, "rnn", "expected ", what, " ", shape, ", got ", state.shape());
  const bool allowed = what[0] == 'h' || kind == RnnKind::lstm || !state.defined();
  CAIRN_CHECK(allowed, "rnn", "expected no c, which is LSTM's, got one");
}

Tensor uniform_parameter(const Shape& shape, std::int64_t hidden) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  Tensor x = Tensor::empty(shape);
  const double bound = hidden > 0 ? 1.0 / std::sqrt(static_cast<double>(hidden)) : 0.0;
  init::uniform(x, -bound, bound);
  return x;
}

// [T, B, 1]: 1 inside of a sequence, 0 after its end.
Tensor mask_of(const std::vector<std::int64_t>& lengths, std::int64_t T, Device device) {
  const auto B = static_cast<std::int64_t>(lengths.size());
  std::vector<float> inside(static_cast<std::size_t>(T * B));
  for (std::size_t i = 0; i < inside.size(); ++i) {
    const auto t = static_cast<std::int64_t>(i) / B;
    inside[i] = t < lengths[i % lengths.size()] ? 1.0f : 0.0f;
  }
  return Tensor::from(inside, {T, B, 1}, DType::f32, device);
}

Tensor at(const Tensor& x, std::int64_t t) {  // [T, ...] -> [...]
  return autograd::reshape(autograd::slice(x, 0, t, t + 1),
                           Shape(x.shape().begin() + 1, x.shape().end()));
}

// The new value inside of sequences, the old one after their end.
Tensor chosen(const Tensor& mask, const Tensor& inside, const Tensor& after) {
  return mask * inside + (mask * -1.0 + 1.0) * after;
}

}  // namespace

// ---- Layers

Recurrent::Recurrent(RnnKind kind, std::int64_t input, std::int64_t hidden,
                     const RnnOptions& options)
    : input_(input), hidden_(hidden), options_(options), kind_(kind) {
  CAIRN_CHECK(input > 0 && hidden > 0 && options.layers > 0, "rnn",
              "expected positive sizes and at least one layer, got ", input, ", ", hidden, " and ",
              options.layers);
  CAIRN_CHECK(options.dropout >= 0.0 && options.dropout <= 1.0, "rnn",
              "expected dropout in 0..1, got ", options.dropout);
  const std::int64_t rows = gates_of(kind) * hidden;
  for (int i = 0; i < options.layers * directions(); ++i) {
    const int layer = i / directions();
    const std::string end = core::str("_l", layer, i % directions() == 1 ? "_reverse" : "");
    const std::int64_t width = layer == 0 ? input : hidden * directions();
    Weights w;
    w.ih = add_parameter("weight_ih" + end, uniform_parameter({rows, width}, hidden));
    w.hh = add_parameter("weight_hh" + end, uniform_parameter({rows, hidden}, hidden));
    if (options.bias) {
      w.bias_ih = add_parameter("bias_ih" + end, uniform_parameter({rows}, hidden));
      w.bias_hh = add_parameter("bias_hh" + end, uniform_parameter({rows}, hidden));
    }
    weights_.push_back(w);
  }
  extra_ = core::str(input, " -> ", hidden, ", ", options.layers,
                     options.layers == 1 ? " layer" : " layers",
                     options.bidirectional ? ", bidirectional" : "");
}

void Recurrent::check(const Tensor& x, const RnnState& initial,
                      const std::vector<std::int64_t>& lengths) const {
  CAIRN_CHECK(x.dims() == 3 && x.size(2) == input_ && x.size(0) > 0, "rnn", "expected x [T, B, ",
              input_, "] with T >= 1, got ", x.shape());
  const Shape states{static_cast<std::int64_t>(weights_.size()), x.size(1), hidden_};
  check_state("h", initial.h, states, kind_);
  check_state("c", initial.c, states, kind_);
  if (lengths.empty()) return;
  CAIRN_CHECK(static_cast<std::int64_t>(lengths.size()) == x.size(1), "rnn", "expected ", x.size(1),
              " lengths, got ", lengths.size());
  for (const std::int64_t length : lengths) {
    CAIRN_CHECK(length >= 0 && length <= x.size(0), "rnn", "expected lengths in 0..", x.size(0),
                ", got ", length);
  }
}

RnnState Recurrent::initial_of(const RnnState& all, int index) const {
  RnnState one;
  if (all.h.defined()) one.h = at(all.h, index);
  if (all.c.defined()) one.c = at(all.c, index);
  return one;
}

// An RNN or a GRU, step by step.
RnnOutput Recurrent::run_steps(const Tensor& x, int index, const Tensor& mask,
                               const RnnState& initial) const {
  const Weights& w = weights_[static_cast<std::size_t>(index)];
  const Tensor projected = autograd::linear(x, w.ih, w.bias_ih);
  const Tensor inside = in_dtype(mask, projected.dtype());
  const std::int64_t T = x.size(0);
  Tensor h = state_like(initial.h, projected, hidden_);
  std::vector<Tensor> results(static_cast<std::size_t>(T));
  for (std::int64_t i = 0; i < T; ++i) {
    const std::int64_t t = is_reverse(index) ? T - 1 - i : i;
    const Tensor next = step_of(kind_, at(projected, t), autograd::linear(h, w.hh, w.bias_hh), h);
    Tensor& result = results[static_cast<std::size_t>(t)];
    result = inside.defined() ? at(inside, t) * next : next;
    h = inside.defined() ? chosen(at(inside, t), next, h) : next;
  }
  return {autograd::stack(results), {h, {}}};
}

RnnOutput Recurrent::run_lstm(const Tensor& x, int index, const Tensor& mask, const Tensor& lengths,
                              const RnnState& initial) const {
  const Weights& w = weights_[static_cast<std::size_t>(index)];
  const autograd::LstmResult result = autograd::lstm(
      x, {w.ih, w.hh, w.bias_ih, w.bias_hh},
      {in_dtype(initial.h, x.dtype()), in_dtype(initial.c, x.dtype()), lengths, is_reverse(index)});
  const Tensor y = mask.defined() ? result.y * autograd::to(mask, result.y.dtype()) : result.y;
  return {y, {result.h, result.c}};
}

RnnOutput Recurrent::run(const Tensor& x, const RnnState& initial,
                         const std::vector<std::int64_t>& lengths) {
  if (!options_.batch_first) return run_layers(x, initial, lengths);
  CAIRN_CHECK(x.dims() == 3, "rnn", "expected x [B, T, ", input_, "], got ", x.shape());
  RnnOutput out = run_layers(autograd::transpose(x, 0, 1), initial, lengths);
  out.y = autograd::transpose(out.y, 0, 1);
  return out;
}

RnnOutput Recurrent::run_layers(const Tensor& x, const RnnState& initial,
                                const std::vector<std::int64_t>& lengths) {
  check(x, initial, lengths);
  Tensor mask, ends;
  if (!lengths.empty()) {
    mask = mask_of(lengths, x.size(0), x.device());
    ends = Tensor::from(lengths, {x.size(1)}, DType::i64, x.device());
  }
  Tensor y = x;
  std::vector<Tensor> h, c;
  for (int layer = 0; layer < options_.layers; ++layer) {
    std::vector<Tensor> sides;
    for (int side = 0; side < directions(); ++side) {
      const int index = layer * directions() + side;
      const RnnState from = initial_of(initial, index);
      const RnnOutput out = kind_ == RnnKind::lstm ? run_lstm(y, index, mask, ends, from)
                                                   : run_steps(y, index, mask, from);
      sides.push_back(out.y);
      h.push_back(out.state.h);
      if (out.state.c.defined()) c.push_back(out.state.c);
    }
    y = sides.size() == 1 ? sides[0] : autograd::concat(sides, 2);
    const bool last = layer + 1 == options_.layers;
    if (training() && !last) y = autograd::dropout(y, options_.dropout);
  }
  return {y, {autograd::stack(h), c.empty() ? Tensor() : autograd::stack(c)}};
}

RNN::RNN(std::int64_t input, std::int64_t hidden, const RnnOptions& options)
    : Recurrent(options.relu ? RnnKind::rnn_relu : RnnKind::rnn_tanh, input, hidden, options) {}
GRU::GRU(std::int64_t input, std::int64_t hidden, const RnnOptions& options)
    : Recurrent(RnnKind::gru, input, hidden, options) {}
LSTM::LSTM(std::int64_t input, std::int64_t hidden, const RnnOptions& options)
    : Recurrent(RnnKind::lstm, input, hidden, options) {}

std::shared_ptr<Module> RNN::make_like() const {
  return std::make_shared<RNN>(input_, hidden_, options_);
}
std::shared_ptr<Module> GRU::make_like() const {
  return std::make_shared<GRU>(input_, hidden_, options_);
}
std::shared_ptr<Module> LSTM::make_like() const {
  return std::make_shared<LSTM>(input_, hidden_, options_);
}

// ---- Cells

RecurrentCell::RecurrentCell(RnnKind kind, std::int64_t input, std::int64_t hidden,
                             const RnnCellOptions& options)
    : input_(input), hidden_(hidden), options_(options), kind_(kind) {
  CAIRN_CHECK(input > 0 && hidden > 0, "rnn", "expected positive sizes, got ", input, " and ",
              hidden);
  const std::int64_t rows = gates_of(kind) * hidden;
  weight_ih_ = add_parameter("weight_ih", uniform_parameter({rows, input}, hidden));
  weight_hh_ = add_parameter("weight_hh", uniform_parameter({rows, hidden}, hidden));
  if (options.bias) {
    bias_ih_ = add_parameter("bias_ih", uniform_parameter({rows}, hidden));
    bias_hh_ = add_parameter("bias_hh", uniform_parameter({rows}, hidden));
  }
  extra_ = core::str(input, " -> ", hidden);
}

RnnState RecurrentCell::step(const Tensor& x, const RnnState& state) {
  CAIRN_CHECK(x.dims() == 2 && x.size(1) == input_, "rnn", "expected x [B, ", input_, "], got ",
              x.shape());
  check_state("h", state.h, {x.size(0), hidden_}, kind_);
  check_state("c", state.c, {x.size(0), hidden_}, kind_);
  if (kind_ == RnnKind::lstm) {
    const autograd::LstmResult result = autograd::lstm(
        autograd::reshape(x, {1, x.size(0), input_}), {weight_ih_, weight_hh_, bias_ih_, bias_hh_},
        {in_dtype(state.h, x.dtype()), in_dtype(state.c, x.dtype()), {}, false});
    return {result.h, result.c};
  }
  const Tensor projected = autograd::linear(x, weight_ih_, bias_ih_);
  const Tensor h = state_like(state.h, projected, hidden_);
  return {step_of(kind_, projected, autograd::linear(h, weight_hh_, bias_hh_), h), {}};
}

RNNCell::RNNCell(std::int64_t input, std::int64_t hidden, const RnnCellOptions& options)
    : RecurrentCell(options.relu ? RnnKind::rnn_relu : RnnKind::rnn_tanh, input, hidden, options) {}
GRUCell::GRUCell(std::int64_t input, std::int64_t hidden, const RnnCellOptions& options)
    : RecurrentCell(RnnKind::gru, input, hidden, options) {}
LSTMCell::LSTMCell(std::int64_t input, std::int64_t hidden, const RnnCellOptions& options)
    : RecurrentCell(RnnKind::lstm, input, hidden, options) {}

std::shared_ptr<Module> RNNCell::make_like() const {
  return std::make_shared<RNNCell>(input_, hidden_, options_);
}
std::shared_ptr<Module> GRUCell::make_like() const {
  return std::make_shared<GRUCell>(input_, hidden_, options_);
}
std::shared_ptr<Module> LSTMCell::make_like() const {
  return std::make_shared<LSTMCell>(input_, hidden_, options_);
}

}  // namespace cairn::nn
