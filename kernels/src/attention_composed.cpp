#include "attention_composed.h"

#include <algorithm>
#include <limits>

#include "temporary.h"

namespace cairn::kernels {

namespace {

Shape scores_shape(const TensorView& q, const TensorView& k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2)};
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
  backend.softmax(scores.view, scores.view, {.causal = options.causal, .scale = options.scale});
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

/// lse = scale s - log_softmax(scale s), at column 0, which a row sees if it sees any.
void write_lse(const Backend& backend, const TensorView& q, const TensorView& k,
               const TensorView& lse, const AttentionOptions& options) {
  const Temporary scores = scores_of(backend, q, k);
  const Temporary logs = temporary(scores.view.shape, scores.view.dtype, q.device);
  backend.softmax(scores.view, logs.view,
                  {.log = true, .causal = options.causal, .scale = options.scale});
  backend.copy(scores.view.select(3, 0), lse);
  backend.axpby(-1.0, logs.view.select(3, 0), options.scale, lse);
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
  backend.softmax_backward(weights.view, gradient.view, gradient.view, {.causal = options.causal});
  backend.matmul(gradient.view, k, dq, {.alpha = options.scale});
  backend.matmul(gradient.view.transpose(-2, -1), q, dk, {.alpha = options.scale});
}

}  // namespace cairn::kernels
