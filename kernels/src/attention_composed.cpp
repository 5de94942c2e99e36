#include "attention_composed.h"

#include <algorithm>
#include <limits>

#include "temporary.h"

namespace cairn::kernels {

namespace {

using View = const TensorView&;

Shape scores_shape(View q, View k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2)};
}

/// x [B, H, N, C] with a row after the other of the heads that share one of k's `heads`: [B, heads,
/// H / heads N, C].
TensorView joined(View x, std::int64_t heads) {
  return x.reshape({x.size(0), heads, x.size(1) / heads * x.size(2), x.size(3)});
}

/// The same of an operand as it lies: a copy where its heads do not lie behind each other.
Temporary joined_copy(const Backend& backend, View x, std::int64_t heads) {
  const Shape shape{x.size(0), heads, x.size(1) / heads * x.size(2), x.size(3)};
  if (x.can_reshape(shape)) return {Tensor(), x.reshape(shape)};
  Temporary copy = temporary(x.shape, x.dtype, x.device);
  backend.copy(x, copy.view);
  return {std::move(copy.owner), joined(copy.view, heads)};
}

/// Rows of y, joined, from a product that writes them.
template <class Write>
void write_joined(const Backend& backend, View y, std::int64_t heads, Write write) {
  const Shape shape{y.size(0), heads, y.size(1) / heads * y.size(2), y.size(3)};
  if (y.can_reshape(shape)) return write(y.reshape(shape));
  const Temporary rows = temporary(shape, y.dtype, y.device);
  write(rows.view);
  backend.copy(rows.view.reshape(y.shape), y);
}

SoftmaxOptions softmax_of(const AttentionOptions& options) {
  return {.causal = options.causal, .scale = options.scale, .lengths = options.key_lengths};
}

/// q k^T, not yet scaled.
Temporary scores_of(const Backend& backend, View q, View k) {
  Temporary scores = temporary(scores_shape(q, k), wide(q.dtype), q.device);
  const Temporary queries = joined_copy(backend, q, k.size(1));
  backend.matmul(queries.view, k.transpose(-2, -1), joined(scores.view, k.size(1)), {});
  return scores;
}

/// In q's dtype; before dropout.
Temporary weights_of(const Backend& backend, const TensorView& q, const TensorView& k,
                     const AttentionOptions& options) {
  Temporary scores = scores_of(backend, q, k);
  backend.softmax(scores.view, scores.view, softmax_of(options));
  if (scores.view.dtype == q.dtype) return scores;
  Temporary weights = temporary(scores.view.shape, q.dtype, q.device);
  backend.copy(scores.view, weights.view);
  return weights;
}

void drop(const Backend& backend, const TensorView& x, const AttentionOptions& options) {
  if (options.dropout > 0.0) {
    backend.dropout(x, options.dropout, options.draw, x);
  }
}

/// -inf in the rows of samples that have no key.
void hide_lse(const Backend& backend, const TensorView& key_lengths, const TensorView& lse) {
  const Temporary seen = temporary({lse.size(0), 1, 1}, lse.dtype, lse.device);
  const Temporary one = temporary({1, 1, 1}, lse.dtype, lse.device);
  const TensorView all_seen = seen.view.expand(lse.shape);
  backend.copy(key_lengths.reshape(seen.view.shape), seen.view);
  backend.fill(one.view, 1.0);
  backend.binary(BinaryOp::minimum, seen.view, one.view.expand(seen.view.shape), seen.view);
  backend.binary(BinaryOp::mask, lse, all_seen, lse);
  backend.unary(UnaryOp::log, seen.view, seen.view, 0.0);
  backend.binary(BinaryOp::add, lse, all_seen, lse);
}

/// lse = scale s - log_softmax(scale s), at column 0, which a row sees if it sees any.
void write_lse(const Backend& backend, const TensorView& q, const TensorView& k,
               const TensorView& lse, const AttentionOptions& options) {
  const Temporary scores = scores_of(backend, q, k);
  const Temporary logs = temporary(scores.view.shape, scores.view.dtype, q.device);
  SoftmaxOptions logs_of = softmax_of(options);
  logs_of.log = true;
  backend.softmax(scores.view, logs.view, logs_of);
  backend.copy(scores.view.select(3, 0), lse);
  backend.axpby(-1.0, logs.view.select(3, 0), options.scale, lse);
  if (options.key_lengths.defined()) hide_lse(backend, options.key_lengths, lse);
  const std::int64_t blind = options.causal ? std::max<std::int64_t>(q.size(2) - k.size(2), 0) : 0;
  if (blind > 0) {
    backend.fill(lse.slice(2, 0, blind), -std::numeric_limits<double>::infinity());
  }
}

}  // namespace

void composed_attention(const Backend& backend, View q, View k, View v, View y, View lse,
                        const AttentionOptions& options) {
  write_lse(backend, q, k, lse, options);
  const Temporary weights = weights_of(backend, q, k, options);
  drop(backend, weights.view, options);
  write_joined(backend, y, v.size(1),
               [&](View rows) { backend.matmul(joined(weights.view, v.size(1)), v, rows, {}); });
}

void composed_attention_backward(const Backend& backend, const TensorView& q, const TensorView& k,
                                 const TensorView& v, const TensorView& dy, const TensorView& dq,
                                 const TensorView& dk, const TensorView& dv,
                                 const AttentionOptions& options) {
  const std::int64_t heads = k.size(1);
  const Temporary weights = weights_of(backend, q, k, options);
  const Temporary gradient = temporary(weights.view.shape, q.dtype, q.device);
  const TensorView rows = joined(gradient.view, heads);
  const Temporary dy_rows = joined_copy(backend, dy, heads);
  const Temporary q_rows = joined_copy(backend, q, heads);
  backend.copy(weights.view, gradient.view);
  drop(backend, gradient.view, options);
  backend.matmul(rows.transpose(-2, -1), dy_rows.view, dv, {});
  backend.matmul(dy_rows.view, v.transpose(-2, -1), rows, {});
  drop(backend, gradient.view, options);
  SoftmaxOptions unscaled = softmax_of(options);
  unscaled.scale = 1.0;
  backend.softmax_backward(weights.view, gradient.view, gradient.view, unscaled);
  write_joined(backend, dq, heads,
               [&](View dq_rows) { backend.matmul(rows, k, dq_rows, {.alpha = options.scale}); });
  backend.matmul(rows.transpose(-2, -1), q_rows.view, dk, {.alpha = options.scale});
}

}  // namespace cairn::kernels
