// Attention as an operation graph of cuDNN's. Its engines know attention by the order of these
// operations (scores, scale, mask, softmax, product), as NVIDIA's cudnn-frontend has them:
//
//   forward:  s = scale q k^T, hidden above the diagonal; lse = max + log sum exp(s - max);
//             y = exp(s - max) / sum v
//   backward: delta = sum dy y; p = exp(s - lse); dv = p^T dy; ds = scale p (dy v^T - delta);
//             dk = ds^T q; dq = ds k
//
// What becomes of dq makes the backward deterministic or not: summed in a buffer of the caller's it
// comes from atomic additions; written as above it is a product of its own, for which ds lies in
// workspace, T x S halves a head.
#pragma once

#include <compare>

#include "cuda/cudnn/graph.h"

namespace cairn::kernels::cuda {

/// Elements between the samples, heads and rows of a [B, H, N, D] operand, whose columns are
/// neighbours.
struct HeadStrides {
  std::int64_t batch = 1, head = 1, row = 1;
  auto operator<=>(const HeadStrides&) const = default;
};

struct SdpaShape {
  int device = 0;
  bool backward = false;
  bool causal = false;  // query t sees keys 0 .. t + keys - queries
  DType dtype = DType::f16;
  std::int64_t batch = 0, heads = 0, key_heads = 0, queries = 0, keys = 0, columns = 0;
  HeadStrides q, k, v, y, dy, dq, dk, dv;

  auto operator<=>(const SdpaShape&) const = default;
};

/// The graph's tensors, by their ids. lse and delta are [B, H, T] f32.
enum SdpaTensor : std::int64_t {
  kSdpaQ = 'q',
  kSdpaK = 'k',
  kSdpaV = 'v',
  kSdpaY = 'y',
  kSdpaLse = 'l',
  kSdpaDy = 'Y',
  kSdpaDq = 'Q',
  kSdpaDk = 'K',
  kSdpaDv = 'V',
  kSdpaDelta = 'd',
  // Numbers: f32, then i32.
  kSdpaScale = 's',
  kSdpaHidden = 'h',
  kSdpaOne = 'o',
  kSdpaQueries = 't',
  kSdpaKeys = 'c'
};

OperationGraph sdpa_graph(const Queue& queue, const CudnnHandle& handle, const SdpaShape& shape);

}  // namespace cairn::kernels::cuda
