#include "attention_composed.h"

#include <algorithm>
#include <limits>

#include "temporary.h"

namespace cairn::kernels {

namespace {

Shape scores_shape(const TensorView& q, const TensorView& k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2)};
}

SoftmaxOptions softmax_of(const AttentionOptions& options) {
  return {.causal = options.causal, .scale = options.scale, .lengths = options.key_lengths};
}

/// q k^T, not yet scaled.
Temporary scores_of(const Backend& backend, const TensorView& q, const TensorView& k) {
  Temporary scores = temporary(scores_shape(q, k), wide(q.dtype), q.device);
  backend.matmul(q, k.transpose(-2, -1), scores.view, {});
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

void composed_attention(const Backend& backend, const TensorView& q, const TensorView& k,
                        const TensorView& v, const TensorView& y, const TensorView& lse,
                        const AttentionOptions& options) {
  write_lse(backend, q, k, lse, options);
  const Temporary weights = weights_of(backend, q, k, options);
  drop(backend, weights.view, options);
  backend.matmul(weights.view, v, y, {});
}

void composed_attention_backward(const Backend& backend, const TensorView& q, const TensorView& k,
                                 const TensorView& v, const TensorView& dy, const TensorView& dq,
                                 const TensorView& dk, const TensorView& dv,
                                 const AttentionOptions& options) {
  const Temporary weights = weights_of(backend, q, k, options);
  const Temporary gradient = temporary(weights.view.shape, q.dtype, q.device);
  backend.copy(weights.view, gradient.view);
  drop(backend, gradient.view, options);
  backend.matmul(gradient.view.transpose(-2, -1), dy, dv, {});
  backend.matmul(dy, v.transpose(-2, -1), gradient.view, {});
  drop(backend, gradient.view, options);
  SoftmaxOptions unscaled = softmax_of(options);
  unscaled.scale = 1.0;
  backend.softmax_backward(weights.view, gradient.view, gradient.view, unscaled);
  backend.matmul(gradient.view, k, dq, {.alpha = options.scale});
  backend.matmul(gradient.view.transpose(-2, -1), q, dk, {.alpha = options.scale});
}

}  // namespace cairn::kernels
