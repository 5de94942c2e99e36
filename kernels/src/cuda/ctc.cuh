// CTC, a block a sequence and a thread a state; the steps follow each other.
#pragma once

#include "cuda/device/simt.h"
#include "math/ctc.h"

namespace cairn::kernels::cuda {

/// The operands that forward and backward share.
template <class A>
struct CtcOperands {
  CtcShape shape;
  const A* log_probs;
  const std::int64_t *targets, *input_lengths, *target_lengths;

  __device__ CtcSequence<A> sequence(std::int64_t n) const {
    return {shape, n, log_probs, targets, input_lengths, target_lengths};
  }
};

template <class A>
__global__ void ctc_loss_kernel(CtcOperands<A> operands, A* alpha, A* loss) {
  const CtcShape& shape = operands.shape;
  for (std::int64_t n = blockIdx.x; n < shape.N; n += gridDim.x) {
    const CtcSequence<A> sequence = operands.sequence(n);
    const bool valid = sequence.valid();
    const std::int64_t steps = valid ? sequence.steps() : 0;
    A* row = alpha + n * shape.T * shape.states();
    const A* last = nullptr;
    for (std::int64_t t = 0; t < steps; ++t, last = row, row += shape.states()) {
      for (std::int64_t s = threadIdx.x; s < sequence.states(); s += blockDim.x) {
        row[s] = sequence.alpha(t, s, last);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      loss[n] = valid ? sequence.loss(last) : std::numeric_limits<A>::quiet_NaN();
    }
  }
}

/// dlog_probs holds zeros; beta [N, 2, states] is room for two steps.
template <class A>
__global__ void ctc_loss_backward_kernel(CtcOperands<A> operands, const A* alpha, const A* loss,
                                         const A* dloss, A* beta, A* dlog_probs) {
  const CtcShape& shape = operands.shape;
  const std::int64_t states = shape.states();
  for (std::int64_t n = blockIdx.x; n < shape.N; n += gridDim.x) {
    const CtcSequence<A> sequence = operands.sequence(n);
    const std::int64_t steps = dloss[n] != A(0) && sequence.valid() ? sequence.steps() : 0;
    for (std::int64_t t = steps - 1; t >= 0; --t) {
      A* here = beta + (2 * n + t % 2) * states;
      const A* after = beta + (2 * n + 1 - t % 2) * states;
      for (std::int64_t s = threadIdx.x; s < sequence.states(); s += blockDim.x) {
        here[s] = sequence.beta(t, s, after);
      }
      __syncthreads();
      for (std::int64_t s = threadIdx.x; s < sequence.states(); s += blockDim.x) {
        const A p = sequence.posterior(s, loss[n], alpha + (n * shape.T + t) * states, here);
        if (!(p < A(0))) dlog_probs[sequence.at(t, sequence.class_of(s))] = -dloss[n] * p;
      }
    }
    __syncthreads();
  }
}

}  // namespace cairn::kernels::cuda
