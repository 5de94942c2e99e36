// LAMB's two passes, a block a chunk, and the step lengths between them, a warp a tensor.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/optimizer_update.cuh"
#include "math/lamb.h"
#include "math/lamb_step.h"

namespace cairn::kernels::cuda {

struct AddNorms {
  __device__ LambNorms operator()(LambNorms a, LambNorms b) const {
    return {a.weight + b.weight, a.update + b.update};
  }
};

/// One element of the first pass.
__device__ inline void lamb_moments(const math::Lamb<float>& lamb, const EntryScalars& scalars,
                                    float gradient, float w, float& m, float& v) {
  lamb.update_moments(math::fma(scalars.l2, w, gradient * scalars.scale), m, v);
}

/// What a moment reads as once it is stored.
__device__ inline float as_stored(float x, DType dtype) {
  return dtype == DType::bf16 ? widen(narrow<BFloat16>(x)) : x;
}

__device__ inline void see(LambNorms& norms, const math::Lamb<float>& lamb, DType moments, float w,
                           float m, float v) {
  const double u = lamb.direction(as_stored(m, moments), as_stored(v, moments), w);
  norms.weight += double{w} * w;
  norms.update += u * u;
}

static __global__ void lamb_moments_kernel(Table table, ListScalars list, math::Lamb<float> lamb,
                                           LambNorms* parts) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const UpdateViews views(slot);
  const EntryScalars scalars = list.of(index);
  const DType moments = views.moment1.dtype;
  LambNorms norms{0.0, 0.0};
  visit_span(
      span_of(blockIdx.x, table.first_chunk[index], slot.count),
      [&](std::int64_t i) {
        const auto gradient = load_pack_or<kLanes>(views.gradient, i, 0.0f);
        const auto w = views.truth.load_pack(i);
        auto m = load_pack_or<kLanes>(views.moment1, i, 0.0f);
        auto v = load_pack_or<kLanes>(views.moment2, i, 0.0f);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) {
          lamb_moments(lamb, scalars, gradient[k], w[k], m[k], v[k]);
          see(norms, lamb, moments, w[k], m[k], v[k]);
        }
        store_pack_any<kLanes>(views.moment1, i, m);
        store_pack_any<kLanes>(views.moment2, i, v);
      },
      [&](std::int64_t i) {
        const float w = views.truth.load(i);
        float m = views.moment1.load<float>(i), v = views.moment2.load<float>(i);
        lamb_moments(lamb, scalars, views.gradient.load<float>(i), w, m, v);
        see(norms, lamb, moments, w, m, v);
        views.moment1.store(i, m);
        views.moment2.store(i, v);
      });
  norms = block_reduce(norms, AddNorms{}, LambNorms{0.0, 0.0});
  if (threadIdx.x == 0) parts[blockIdx.x] = norms;
}

/// Lane k adds every 32nd chunk from k on.
static __global__ void lamb_steps_kernel(Table table, const LambNorms* parts, double lr,
                                         bool adaptive, float* steps) {
  const std::int32_t slot = static_cast<std::int32_t>(blockIdx.x);
  LambNorms norms{0.0, 0.0};
  for (std::int32_t k = table.first_chunk[slot] + static_cast<std::int32_t>(threadIdx.x);
       k < table.first_chunk[slot + 1]; k += static_cast<std::int32_t>(blockDim.x)) {
    norms = AddNorms{}(norms, parts[k]);
  }
  norms = block_reduce(norms, AddNorms{}, LambNorms{0.0, 0.0});
  if (threadIdx.x == 0) steps[slot] = static_cast<float>(lamb_step(lr, adaptive, norms));
}

static __global__ void lamb_weights_kernel(Table table, math::Lamb<float> lamb,
                                           const float* steps) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const UpdateViews views(slot);
  const float step = steps[index];
  visit_span(
      span_of(blockIdx.x, table.first_chunk[index], slot.count),
      [&](std::int64_t i) {
        auto w = views.truth.load_pack(i);
        const auto m = load_pack_or<kLanes>(views.moment1, i, 0.0f);
        const auto v = load_pack_or<kLanes>(views.moment2, i, 0.0f);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) w[k] -= step * lamb.direction(m[k], v[k], w[k]);
        views.truth.store_pack(i, w);
      },
      [&](std::int64_t i) {
        const float w = views.truth.load(i);
        const float m = views.moment1.load<float>(i), v = views.moment2.load<float>(i);
        views.truth.store(i, w - step * lamb.direction(m, v, w));
      });
}

}  // namespace cairn::kernels::cuda
