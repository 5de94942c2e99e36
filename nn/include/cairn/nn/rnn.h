// Recurrent layers and cells, in PyTorch's formulas, parameter names and layouts.
//
//   nn::LSTM lstm(64, 128, {.layers = 2, .bidirectional = true});
//   auto [y, state] = lstm.run(x);                    // x [T, B, 64] -> y [T, B, 256]
//   auto packed = lstm.run(x, {}, {12, 9, 4});        // sequences of these lengths, zeros after
//
// H is the hidden size, G the gates (RNN 1, GRU 3: r z n, LSTM 4: i f g o). Layer l has
// weight_ih_l{l} [G H, I], weight_hh_l{l} [G H, H] and bias_ih_l{l}, bias_hh_l{l} [G H], all
// uniform in +-1 / sqrt(H) at first; the reverse direction's names end in _reverse. Layers above
// the first take both directions: I = 2 H. A layer of LSTM is one operation, autograd::lstm; RNN
// and GRU are made of linear, sigmoid, tanh and element-wise operations. In an autocast region the
// products, and so the states and results, are half.
#pragma once

#include <string>
#include <vector>

#include "cairn/nn/module.h"

namespace cairn::nn {

struct RnnOptions {
  int layers = 1;
  bool bidirectional = false;
  bool bias = true;
  bool relu = false;         // RNN: relu instead of tanh
  bool batch_first = false;  // x is [B, T, I] and y [B, T, H directions]; states stay as they are
  double dropout = 0.0;      // in training, of the results of each layer but the last
};

/// The state of a layer is [layers * directions, B, H], lower layers first and forward before
/// reverse; that of a cell is [B, H]. Only LSTM has c. An undefined tensor stands for zeros.
struct RnnState {
  Tensor h, c;
};

struct RnnOutput {
  Tensor y;  // [T, B, H * directions]; [B, T, ...] where batch_first
  RnnState state;
};

/// What a layer computes in a step.
enum class RnnKind { rnn_tanh, rnn_relu, gru, lstm };

/// What RNN, GRU and LSTM share.
class Recurrent : public Module {
 public:
  /// Starts from zeros and runs over whole sequences: x [T, B, I], T >= 1.
  Tensor forward(const Tensor& x) override { return run(x).y; }
  /// `lengths` are those of the B sequences, 0 .. T each; none means that all have T. As with
  /// PyTorch's packed sequences, the results after the end of a sequence are 0, its last state is
  /// that of its end, and the reverse direction starts there.
  RnnOutput run(const Tensor& x, const RnnState& initial = {},
                const std::vector<std::int64_t>& lengths = {});

 protected:
  Recurrent(RnnKind kind, std::int64_t input, std::int64_t hidden, const RnnOptions& options);
  std::int64_t input_, hidden_;
  RnnOptions options_;

 private:
  struct Weights {
    Tensor ih, hh, bias_ih, bias_hh;
  };
  int directions() const { return options_.bidirectional ? 2 : 1; }
  void check(const Tensor& x, const RnnState& initial,
             const std::vector<std::int64_t>& lengths) const;
  RnnOutput run_layers(const Tensor& x, const RnnState& initial,
                       const std::vector<std::int64_t>& lengths);
  RnnState initial_of(const RnnState& all, int index) const;
  bool is_reverse(int index) const { return index % directions() == 1; }
  RnnOutput run_steps(const Tensor& x, int index, const Tensor& mask,
                      const RnnState& initial) const;
  RnnOutput run_lstm(const Tensor& x, int index, const Tensor& mask, const Tensor& lengths,
                     const RnnState& initial) const;

  RnnKind kind_;
  std::vector<Weights> weights_;  // by layer, then direction
};

class RNN : public Recurrent {
 public:
  RNN(std::int64_t input, std::int64_t hidden, const RnnOptions& options = {});
  std::string kind() const override { return "RNN"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

class GRU : public Recurrent {
 public:
  GRU(std::int64_t input, std::int64_t hidden, const RnnOptions& options = {});
  std::string kind() const override { return "GRU"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

class LSTM : public Recurrent {
 public:
  LSTM(std::int64_t input, std::int64_t hidden, const RnnOptions& options = {});
  std::string kind() const override { return "LSTM"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

struct RnnCellOptions {
  bool bias = true;
  bool relu = false;  // RNNCell: relu instead of tanh
};

/// What RNNCell, GRUCell and LSTMCell share: one step. Parameters weight_ih [G H, I], weight_hh
/// [G H, H], bias_ih and bias_hh [G H].
class RecurrentCell : public Module {
 public:
  Tensor forward(const Tensor& x) override { return step(x).h; }  // from zeros
  /// x [B, I].
  RnnState step(const Tensor& x, const RnnState& state = {});

 protected:
  RecurrentCell(RnnKind kind, std::int64_t input, std::int64_t hidden,
                const RnnCellOptions& options);
  std::int64_t input_, hidden_;
  RnnCellOptions options_;

 private:
  RnnKind kind_;
  Tensor weight_ih_, weight_hh_, bias_ih_, bias_hh_;
};

class RNNCell : public RecurrentCell {
 public:
  RNNCell(std::int64_t input, std::int64_t hidden, const RnnCellOptions& options = {});
  std::string kind() const override { return "RNNCell"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

class GRUCell : public RecurrentCell {
 public:
  GRUCell(std::int64_t input, std::int64_t hidden, const RnnCellOptions& options = {});
  std::string kind() const override { return "GRUCell"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

class LSTMCell : public RecurrentCell {
 public:
  LSTMCell(std::int64_t input, std::int64_t hidden, const RnnCellOptions& options = {});
  std::string kind() const override { return "LSTMCell"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

}  // namespace cairn::nn
