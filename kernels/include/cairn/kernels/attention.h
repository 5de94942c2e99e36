// Scaled dot-product attention whose T x S weights are never stored (Dao et al. 2022; Rabe & Staats
// 2021): each row keeps the log of its sum of exponentials, from which the backward makes the
// weights anew, tile by tile.
#pragma once

#include "cairn/core/generator.h"
#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

struct AttentionOptions {
  bool causal = false;   // row t sees columns 0 .. t + S - T only; a row that sees none gives 0
  double scale = 1.0;    // of the scores: 1 / sqrt(D) by custom
  double dropout = 0.0;  // in 0..1: of the weights, as dropout() drops elements of [B, H, T, S]
  core::RandomDraw draw = {};  // what drops them
  /// [B] i64, contiguous, on q's device, or undefined: queries of sample b see keys 0 ..
  /// key_lengths[b] - 1 only (0 .. S). Of the padding behind them only finite values are asked; its
  /// gradients are 0.
  TensorView key_lengths = {};
};

/// y [B, H, T, D] = dropout(softmax(scale q k^T)) v, with q [B, H, T, D], k and v [B, G, S, D], all
/// of one floating dtype and with any strides: heads may lie interleaved, as in a projection's
/// output. H is a multiple of G: H / G neighbouring heads of q share one of k and v (grouped-query
/// attention, Ainslie et al. 2023). lse [B, H, T], contiguous, f32 (f64 for f64), is written too,
/// for the backward: the log of the row's sum of exponentials, -inf where the row sees nothing.
/// Sums are in f32 (f64 for f64); half weights may be rounded to half before they meet v. y and lse
/// overlap nothing.
void attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& y,
               const TensorView& lse, const AttentionOptions& options);

/// dq, dk, dv of the shapes and dtype of q, k, v, with any strides, from dy and the forward's y and
/// lse, with its options. They overlap none of the inputs. What heads that share keys give to dk
/// and dv is summed in f32 and rounded once. The same bits in every run, on a CPU for the same
/// number of threads.
void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                        const TensorView& y, const TensorView& lse, const TensorView& dy,
                        const TensorView& dq, const TensorView& dk, const TensorView& dv,
                        const AttentionOptions& options);

}  // namespace cairn::kernels
