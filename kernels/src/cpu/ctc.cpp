// CTC: a sequence a thread.
#include "cairn/kernels/ctc.h"

#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "math/ctc.h"

namespace cairn::kernels {

namespace {

CtcShape ctc_shape(const TensorView& log_probs, const CtcTargets& t) {
  return {log_probs.size(0), log_probs.size(1), log_probs.size(2), t.targets.size(1), t.blank};
}

/// Calls body(sequence, n, A{}) for every sequence.
template <class Body>
void for_sequences(const TensorView& log_probs, const CtcTargets& t, const Body& body) {
  const CtcShape shape = ctc_shape(log_probs, t);
  const auto all = [&](auto zero) {
    using A = decltype(zero);
    core::parallel_for(shape.N, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const CtcSequence<A> sequence(shape, n, log_probs.as<A>(), t.targets.as<std::int64_t>(),
                                      t.input_lengths.as<std::int64_t>(),
                                      t.target_lengths.as<std::int64_t>());
        CAIRN_CHECK(sequence.valid(), "ctc_loss", "expected lengths up to ", shape.T, " and ",
                    shape.S, " and classes in 0..", shape.C - 1, ", got others in sequence ", n);
        body(sequence, n, zero);
      }
    });
  };
  log_probs.dtype == DType::f64 ? all(double{}) : all(float{});
}

}  // namespace

void CpuBackend::ctc_loss(View log_probs, const CtcTargets& targets, View loss, View alpha) const {
  const CtcShape shape = ctc_shape(log_probs, targets);
  for_sequences(log_probs, targets, [&](const auto& sequence, std::int64_t n, auto zero) {
    using A = decltype(zero);
    A* row = alpha.as<A>() + n * shape.T * shape.states();
    const A* last = nullptr;
    for (std::int64_t t = 0; t < sequence.steps(); ++t, last = row, row += shape.states()) {
      for (std::int64_t s = 0; s < sequence.states(); ++s) row[s] = sequence.alpha(t, s, last);
    }
    loss.as<A>()[n] = sequence.loss(last);
  });
}

void CpuBackend::ctc_loss_backward(View log_probs, const CtcTargets& targets, View loss, View alpha,
                                   View dloss, View dlog_probs) const {
  const CtcShape shape = ctc_shape(log_probs, targets);
  fill(dlog_probs, 0.0);
  for_sequences(log_probs, targets, [&](const auto& sequence, std::int64_t n, auto zero) {
    using A = decltype(zero);
    const A d = dloss.as<A>()[n];
    if (d == A(0)) return;
    std::vector<A> beta(static_cast<std::size_t>(shape.states())), after(beta);
    for (std::int64_t t = sequence.steps() - 1; t >= 0; --t, beta.swap(after)) {
      const A* row = alpha.as<A>() + (n * shape.T + t) * shape.states();
      for (std::int64_t s = 0; s < sequence.states(); ++s) {
        beta[static_cast<std::size_t>(s)] = sequence.beta(t, s, after.data());
      }
      for (std::int64_t s = 0; s < sequence.states(); ++s) {
        const A p = sequence.posterior(s, loss.as<A>()[n], row, beta.data());
        if (!(p < A(0))) dlog_probs.as<A>()[sequence.at(t, sequence.class_of(s))] = -d * p;
      }
    }
  });
}

}  // namespace cairn::kernels
