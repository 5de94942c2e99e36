// The MLP's work on a GPU, in a stream.
#pragma once

#include <cstddef>

struct CUstream_st;  // cudaStream_t

namespace plain {

struct MlpSizes {
  std::size_t rows = 16, tokens = 8;  // of a step; a row's tokens tell the next one
  std::size_t vocabulary = 11, width = 16, hidden = 64;
};

/// Where each parameter lies in one array of all: [vocabulary, width], [tokens * width, hidden],
/// [hidden], [hidden, vocabulary], [vocabulary].
struct MlpLayout {
  std::size_t wte, w1, b1, w2, b2, size;

  explicit MlpLayout(const MlpSizes& s)
      : wte(0),
        w1(wte + s.vocabulary * s.width),
        b1(w1 + s.tokens * s.width * s.hidden),
        w2(b1 + s.hidden),
        b2(w2 + s.hidden * s.vocabulary),
        size(b2 + s.vocabulary) {}
};

template <class Real>
struct MlpArrays {
  Real *weights = nullptr, *gradients = nullptr;  // of Real: float or a 16-bit type
  int *inputs = nullptr, *targets = nullptr;      // [rows, tokens], [rows]
  float *hidden = nullptr, *dhidden = nullptr;    // [rows, hidden]
  float *dlogits = nullptr, *losses = nullptr;    // [rows, vocabulary], [rows]
};

/// Losses, and the gradients of their mean times `scale`.
template <class Real>
void forward_backward(const MlpSizes& sizes, const MlpArrays<Real>& arrays, float scale,
                      CUstream_st* stream);

/// One step of AdamW over all elements. Gradients are divided by `ranks`.
void adamw(float* weights, const float* gradients, float* m, float* v, std::size_t size, int step,
           float lr, float decay, int ranks, CUstream_st* stream);

}  // namespace plain
