// The recurrent part of an LSTM layer (Hochreiter & Schmidhuber 1997; forget gate: Gers et al.
// 2000):
//
//   i, f, o = sigmoid(a_i), sigmoid(a_f), sigmoid(a_o),  g = tanh(a_g), a = x W_ih^T + b + h W_hh^T
//   c' = f c + i g,  h' = o tanh(c')
//
// The share of the inputs, x W_ih^T + b, is a product over all steps at once and comes as `gates`.
// T steps, B sequences, H units; gates lie i f g o. Everything is contiguous; "wide" is f32, f64
// for f64: the arithmetic is wide, and so is what one step hands to the next but for h.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// lengths [B] i64, or undefined where all sequences have T steps: sequence b takes part in steps
/// 0 .. lengths[b] - 1, and keeps its state in the others. In reverse the last step comes first.
struct LstmOptions {
  TensorView lengths;
  bool reverse = false;
};

/// gates [T, B, 4 H]: from the inputs' share to the activations, in place. weight [4 H, H]. h and c
/// [T + 1, B, H] hold the state before step t in row t and after it in row t + 1, in reverse the
/// other way round: row 0 (in reverse: T) is read, the others are written. All of one floating
/// dtype; c is carried in wide numbers and rounded only where it is kept. Overlap: none.
void lstm(const TensorView& gates, const TensorView& weight, const TensorView& h,
          const TensorView& c, const LstmOptions& options = {});

/// gates: from the activations to the gradients of what was before them, in place; weight and c as
/// lstm left them. dy [T + 1, B, H] of their dtype: the gradient of h, whose row of the initial
/// state is not looked at. dh and dc [B, H], wide: what of the gradient of the last state is not in
/// dy goes in, the gradient of the initial state comes out. Overlap: none.
void lstm_backward(const TensorView& gates, const TensorView& weight, const TensorView& c,
                   const TensorView& dy, const TensorView& dh, const TensorView& dc,
                   const LstmOptions& options = {});

/// One step of one of the loops above, after the product; the views are the step's rows.
struct LstmStep {
  TensorView lengths;  // [B] i64 or undefined
  std::int64_t t = 0;
};

/// gates [B, 4 H] in place; hidden [B, 4 H], wide: h W_hh^T. carry [B, H], wide: from the c before
/// to the one after, which c [B, H] keeps rounded. h_before and h [B, H].
void lstm_cell(const TensorView& gates, const TensorView& hidden, const TensorView& carry,
               const TensorView& h_before, const TensorView& h, const TensorView& c,
               const LstmStep& step = {});

/// gates [B, 4 H] in place; dh [B, H], wide: from the gradient of the state after, to which dy's is
/// added, to what of the one before does not come through the gates: 0, but past the end of a
/// sequence. dc [B, H], wide: of the state after to the one before.
void lstm_cell_backward(const TensorView& gates, const TensorView& c_before, const TensorView& c,
                        const TensorView& dy, const TensorView& dh, const TensorView& dc,
                        const LstmStep& step = {});

}  // namespace cairn::kernels
