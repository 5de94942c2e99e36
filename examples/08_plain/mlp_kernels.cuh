// Kernels of an MLP that tells the next token from those before: a thread an element of what it
// writes, sums in f32.
#pragma once

#include "mlp_kernels.h"

namespace plain {
namespace {

__device__ inline unsigned this_thread() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

inline unsigned blocks_for(std::size_t elements) {
  return static_cast<unsigned>((elements + 127) / 128);
}

/// hidden = relu(x w1 + b1), where x is the embeddings of the row's tokens.
template <class Real>
__global__ void hidden_kernel(MlpSizes s, MlpLayout at, MlpArrays<Real> a) {
  const unsigned i = this_thread();
  if (i >= s.rows * s.hidden) return;
  const std::size_t row = i / s.hidden, h = i % s.hidden;
  float sum = static_cast<float>(a.weights[at.b1 + h]);
  for (std::size_t t = 0; t < s.tokens; ++t) {
    const Real* x = a.weights + at.wte + a.inputs[row * s.tokens + t] * s.width;
    const Real* w = a.weights + at.w1 + t * s.width * s.hidden + h;
    for (std::size_t e = 0; e < s.width; ++e)
      sum += static_cast<float>(x[e]) * static_cast<float>(w[e * s.hidden]);
  }
  a.hidden[i] = sum > 0.0f ? sum : 0.0f;
}

/// A row's loss and the gradient of its logits, which is its probabilities less the target.
template <class Real>
__global__ void loss_kernel(MlpSizes s, MlpLayout at, MlpArrays<Real> a, float scale) {
  const unsigned row = this_thread();
  if (row >= s.rows) return;
  float* logits = a.dlogits + row * s.vocabulary;
  float most = -1e30f;
  for (std::size_t v = 0; v < s.vocabulary; ++v) {
    float sum = static_cast<float>(a.weights[at.b2 + v]);
    for (std::size_t h = 0; h < s.hidden; ++h)
      sum += a.hidden[row * s.hidden + h] *
             static_cast<float>(a.weights[at.w2 + h * s.vocabulary + v]);
    logits[v] = sum;
    most = sum > most ? sum : most;
  }
  float total = 0.0f;
  for (std::size_t v = 0; v < s.vocabulary; ++v) total += expf(logits[v] - most);
  const auto target = static_cast<std::size_t>(a.targets[row]);
  a.losses[row] = logf(total) + most - logits[target];
  for (std::size_t v = 0; v < s.vocabulary; ++v) {
    const float p = expf(logits[v] - most) / total - (v == target ? 1.0f : 0.0f);
    logits[v] = p * scale / static_cast<float>(s.rows);
  }
}

template <class Real>
__global__ void output_backward_kernel(MlpSizes s, MlpLayout at, MlpArrays<Real> a) {
  const unsigned i = this_thread();
  if (i < s.hidden * s.vocabulary) {
    const std::size_t h = i / s.vocabulary, v = i % s.vocabulary;
    float sum = 0.0f;
    for (std::size_t row = 0; row < s.rows; ++row)
      sum += a.hidden[row * s.hidden + h] * a.dlogits[row * s.vocabulary + v];
    a.gradients[at.w2 + i] = Real(sum);
  } else if (i < s.hidden * s.vocabulary + s.vocabulary) {
    const std::size_t v = i - s.hidden * s.vocabulary;
    float sum = 0.0f;
    for (std::size_t row = 0; row < s.rows; ++row) sum += a.dlogits[row * s.vocabulary + v];
    a.gradients[at.b2 + v] = Real(sum);
  }
}

template <class Real>
__global__ void dhidden_kernel(MlpSizes s, MlpLayout at, MlpArrays<Real> a) {
  const unsigned i = this_thread();
  if (i >= s.rows * s.hidden) return;
  const std::size_t row = i / s.hidden, h = i % s.hidden;
  float sum = 0.0f;
  for (std::size_t v = 0; v < s.vocabulary; ++v)
    sum += a.dlogits[row * s.vocabulary + v] *
           static_cast<float>(a.weights[at.w2 + h * s.vocabulary + v]);
  a.dhidden[i] = a.hidden[i] > 0.0f ? sum : 0.0f;
}

template <class Real>
__global__ void hidden_backward_kernel(MlpSizes s, MlpLayout at, MlpArrays<Real> a) {
  const unsigned i = this_thread();
  const std::size_t rows_of_w1 = s.tokens * s.width;
  if (i >= (rows_of_w1 + 1) * s.hidden) return;
  const std::size_t x = i / s.hidden, h = i % s.hidden;  // the last x is the bias
  const std::size_t t = x / s.width, e = x % s.width;
  float sum = 0.0f;
  for (std::size_t row = 0; row < s.rows; ++row) {
    float value = 1.0f;
    if (x < rows_of_w1)
      value = static_cast<float>(a.weights[at.wte + a.inputs[row * s.tokens + t] * s.width + e]);
    sum += value * a.dhidden[row * s.hidden + h];
  }
  a.gradients[at.w1 + i] = Real(sum);  // b1 comes after w1
}

template <class Real>
__global__ void embedding_backward_kernel(MlpSizes s, MlpLayout at, MlpArrays<Real> a) {
  const unsigned i = this_thread();
  if (i >= s.vocabulary * s.width) return;
  const std::size_t token = i / s.width, e = i % s.width;
  float sum = 0.0f;
  for (std::size_t row = 0; row < s.rows; ++row) {
    for (std::size_t t = 0; t < s.tokens; ++t) {
      if (static_cast<std::size_t>(a.inputs[row * s.tokens + t]) != token) continue;
      const Real* w = a.weights + at.w1 + (t * s.width + e) * s.hidden;
      for (std::size_t h = 0; h < s.hidden; ++h)
        sum += static_cast<float>(w[h]) * a.dhidden[row * s.hidden + h];
    }
  }
  a.gradients[at.wte + i] = Real(sum);
}

}  // namespace

template <class Real>
void forward_backward(const MlpSizes& s, const MlpArrays<Real>& a, float scale,
                      CUstream_st* stream) {
  const MlpLayout at(s);
  hidden_kernel<Real><<<blocks_for(s.rows * s.hidden), 128, 0, stream>>>(s, at, a);
  loss_kernel<Real><<<blocks_for(s.rows), 128, 0, stream>>>(s, at, a, scale);
  output_backward_kernel<Real>
      <<<blocks_for((s.hidden + 1) * s.vocabulary), 128, 0, stream>>>(s, at, a);
  dhidden_kernel<Real><<<blocks_for(s.rows * s.hidden), 128, 0, stream>>>(s, at, a);
  hidden_backward_kernel<Real>
      <<<blocks_for((s.tokens * s.width + 1) * s.hidden), 128, 0, stream>>>(s, at, a);
  embedding_backward_kernel<Real><<<blocks_for(s.vocabulary * s.width), 128, 0, stream>>>(s, at, a);
}

}  // namespace plain
