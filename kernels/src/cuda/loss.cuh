// Cross entropy, a block a row, one read of the logits forward; mean squared error and binary cross
// entropy element by element.
#pragma once

#include "cairn/kernels/loss.h"
#include "cuda/softmax.cuh"
#include "math/losses.h"

namespace cairn::kernels::cuda {

struct CrossEntropyShape {
  std::int64_t rows, classes, ignore_index;
  double smoothing;
  std::int64_t target_stride;
  ClassSlice slice;  // backward
};

template <class A>
__device__ A not_a_number() {
  return std::numeric_limits<A>::quiet_NaN();
}

template <class T>
__global__ void cross_entropy_kernel(CrossEntropyShape shape, const T* logits,
                                     const std::int64_t* targets, AnyFloat loss, AnyFloat lse) {
  using A = Arithmetic<T>;
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const T* const x = logits + row * shape.classes;
    const std::int64_t target = targets[row * shape.target_stride];
    A total = 0;
    const A log_sum =
        row_online_sum(x, shape.classes, A(1), [&](A value) { total += value; }).log_sum_exp();
    if (shape.smoothing != 0.0) total = block_sum(total);
    if (threadIdx.x != 0) continue;
    lse.store(row, log_sum);
    if (target == shape.ignore_index) {
      loss.store(row, A(0));
    } else if (target < 0 || target >= shape.classes) {
      loss.store(row, not_a_number<A>());
    } else {
      const A s = static_cast<A>(shape.smoothing);
      const A sharp = log_sum - widen(x[target]);
      const A flat = s == A(0) ? A(0) : s * (log_sum - total / static_cast<A>(shape.classes));
      loss.store(row, (A(1) - s) * sharp + flat);
    }
  }
}

/// dlogits may be logits.
template <class T>
__global__ void cross_entropy_backward_kernel(CrossEntropyShape shape, const T* logits,
                                              const std::int64_t* targets, AnyFloat lse,
                                              AnyFloat dloss, T* dlogits) {
  using A = Arithmetic<T>;
  const A flat = static_cast<A>(shape.smoothing / static_cast<double>(shape.slice.all));
  const A sharp = static_cast<A>(1.0 - shape.smoothing);
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const std::int64_t start = row * shape.classes, target = targets[row * shape.target_stride];
    const bool ignored = target == shape.ignore_index;
    const bool wrong = !ignored && (target < 0 || target >= shape.slice.all);
    const std::int64_t hot = target - shape.slice.first;
    const A scale = wrong ? not_a_number<A>() : dloss.load<A>(row);
    const A log_sum = lse.load<A>(row);
    const auto gradient = [&](std::int64_t i, A x) {
      const A p = math::exp(x - log_sum);
      return ignored ? A(0) : scale * (p - flat - (i == hot ? sharp : A(0)));
    };
    map_row(shape.classes, gradient, dlogits + start, logits + start);
  }
}

// L is the loss's type: float, or double with double inputs.
template <class T, class L>
struct SquaredError {
  __device__ L operator()(T x, T target) const {
    const auto d = widen(x) - widen(target);
    return static_cast<L>(d * d);
  }
};
template <class T, class L>
struct SquaredErrorBackward {
  __device__ T operator()(T x, T target, L dloss) const {
    using A = Arithmetic<T>;
    return narrow<T>(A(2) * (widen(x) - widen(target)) * static_cast<A>(dloss));
  }
};

template <class T, class L>
struct BinaryCrossEntropy {
  __device__ L operator()(T logit, T target) const {
    using A = Arithmetic<T>;
    const A x = widen(logit), t = widen(target);
    return static_cast<L>(math::max(x, A(0)) - x * t + log1p(math::exp(-math::abs(x))));
  }
};
template <class T, class L>
struct BinaryCrossEntropyBackward {
  __device__ T operator()(T logit, T target, L dloss) const {
    using A = Arithmetic<T>;
    const A probability = A(1) / (A(1) + math::exp(-widen(logit)));
    return narrow<T>((probability - widen(target)) * static_cast<A>(dloss));
  }
};

template <class T, class L>
struct ProbabilityCrossEntropy {
  __device__ L operator()(T p, T target) const {
    return static_cast<L>(math::ProbabilityCrossEntropy{}.forward(widen(p), widen(target)));
  }
};
template <class T, class L>
struct ProbabilityCrossEntropyBackward {
  __device__ T operator()(T p, T target, L dloss) const {
    using A = Arithmetic<T>;
    return narrow<T>(
        math::ProbabilityCrossEntropy{}.backward(widen(p), widen(target), static_cast<A>(dloss)));
  }
};

}  // namespace cairn::kernels::cuda
