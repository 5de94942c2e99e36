// LAMB's two passes, a block a chunk, and the step lengths between them, a warp a tensor.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/launch.cuh"
#include "cuda/list_chunk.cuh"
#include "cuda/optimizer_list.cuh"
#include "cuda/optimizer_update.cuh"
#include "math/lamb.h"
#include "math/lamb_step.h"

namespace cairn::kernels::cuda {

struct AddNorms {
  __device__ LambNorms operator()(LambNorms a, LambNorms b) const {
    return {a.weight + b.weight, a.update + b.update};
  }
};

/// The rule as the host has worked it out; RuleOnDevice<LambOptions> is the other one.
struct LambOfHost {
  ListScalars list;
  math::Lamb<float> lamb;
  double length;

  template <class F>
  __device__ __forceinline__ void with(std::int32_t slot, F f) const {
    const EntryScalars scalars = list.of(slot);
    f(lamb, scalars);
  }
  __device__ bool skipped() const { return false; }
  __device__ double lr() const { return length; }
};

/// One element of the first pass.
__device__ inline void lamb_moments(const math::Lamb<float>& lamb, const EntryScalars& scalars,
                                    float gradient, float w, float& m, float& v) {
  lamb.update_moments(math::fma(scalars.l2, w, gradient * scalars.scale), m, v);
}

/// m and v as they read once they are stored.
__device__ inline void see(LambNorms& norms, const math::Lamb<float>& lamb, float w, float m,
                           float v) {
  const double u = lamb.direction(m, v, w);
  norms.weight += double{w} * w;
  norms.update += u * u;
}

/// One block of a sum, by a warp; what its lanes have seen.
__device__ inline LambNorms lamb_moments_of_block(const Slot& slot, const Span& block,
                                                  const math::Lamb<float>& lamb,
                                                  const EntryScalars& scalars) {
  const UpdateViews views(slot);
  LambNorms norms{0.0, 0.0};
  visit_entry_by_lanes(
      slot, block,
      [&](const auto& entry, std::int64_t i) {
        const auto gradient = entry.load_gradient(i);
        const auto w = entry.load_truth(i);
        auto m = entry.load_moment(entry.moment1, i);
        auto v = entry.load_moment(entry.moment2, i);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) {
          lamb_moments(lamb, scalars, gradient[k], w[k], m[k], v[k]);
          see(norms, lamb, w[k], entry.stored(m[k]), entry.stored(v[k]));
        }
        entry.store_moment(entry.moment1, i, m);
        entry.store_moment(entry.moment2, i, v);
      },
      [&](std::int64_t i) {
        const float w = views.load_truth(i);
        float m = views.moment1.load<float>(i), v = views.moment2.load<float>(i);
        lamb_moments(lamb, scalars, views.gradient.load<float>(i), w, m, v);
        views.moment1.store(i, m);
        views.moment2.store(i, v);
        see(norms, lamb, w, views.moment1.load<float>(i), views.moment2.load<float>(i));
      });
  return norms;
}

/// Summed as check_chunks_kernel sums.
template <class Rule>
__global__ void lamb_moments_kernel(Table table, Rule rule, LambNorms* parts) {
  constexpr int kBlocks = static_cast<int>(kSumChunk / kSumBlock);
  SIMT_SHARED(LambNorms, sums, kBlocks);
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const Span span = span_of(blockIdx.x, table.first_chunk[index], slot.count);
  for (int b = static_cast<int>(threadIdx.x / 32); b < kBlocks;
       b += static_cast<int>(blockDim.x / 32)) {
    const std::int64_t begin = span.begin + b * kSumBlock;
    const Span block{begin, smaller(begin + kSumBlock, span.end)};
    LambNorms norms{0.0, 0.0};
    rule.with(index, [&](const math::Lamb<float>& lamb, const EntryScalars& scalars) {
      norms = lamb_moments_of_block(slot, block, lamb, scalars);
    });
    norms = warp_reduce(norms, AddNorms{});
    if (threadIdx.x % 32 == 0) sums[b] = norms;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  LambNorms total{0.0, 0.0};
  for (int b = 0; b < kBlocks; ++b) total = AddNorms{}(total, sums[b]);
  parts[blockIdx.x] = total;
}

/// A warp a tensor.
template <class Rule>
__global__ void lamb_steps_kernel(Table table, const LambNorms* parts, Rule rule, bool adaptive,
                                  float* steps) {
  if (rule.skipped()) return;
  const auto slot = static_cast<std::int32_t>(blockIdx.x);
  const LambNorms norms = joined_chunks(table, slot, parts, AddNorms{}, LambNorms{0.0, 0.0});
  if (threadIdx.x == 0) steps[slot] = static_cast<float>(lamb_step(rule.lr(), adaptive, norms));
}

template <class Rule>
__global__ void lamb_weights_kernel(Table table, Rule rule, const float* steps) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const UpdateViews views(slot);
  rule.with(index, [&](const math::Lamb<float>& lamb, const EntryScalars&) {
    const float step = steps[index];
    visit_entry(
        slot, span_of(blockIdx.x, table.first_chunk[index], slot.count),
        [&](const auto& entry, std::int64_t i) {
          auto w = entry.load_truth(i);
          const auto m = entry.load_moment(entry.moment1, i);
          const auto v = entry.load_moment(entry.moment2, i);
          SIMT_UNROLL
          for (int k = 0; k < kLanes; ++k) w[k] -= step * lamb.direction(m[k], v[k], w[k]);
          entry.store_truth(i, w);
        },
        [&](std::int64_t i) {
          const float w = views.load_truth(i);
          const float m = views.moment1.load<float>(i), v = views.moment2.load<float>(i);
          views.store_truth(i, w - step * lamb.direction(m, v, w));
        });
  });
}

template <class Rule>
void update_lamb(const Queue& queue, const UpdateList& list, const LambOptions& options,
                 const Rule& rule) {
  const DeviceTable kept(queue, slots_of(list));
  const Table table = kept.table();
  if (table.chunk_count == 0) return;
  const Buffer<LambNorms> parts(queue, table.chunk_count);
  const Buffer<float> steps(queue, table.slot_count);
  launch(queue, {table.chunk_count, kThreads}, lamb_moments_kernel<Rule>, table, rule,
         parts.data());
  launch(queue, {table.slot_count, 32}, lamb_steps_kernel<Rule>, table, parts.data(), rule,
         is_adaptive(options), steps.data());
  launch(queue, {table.chunk_count, kThreads}, lamb_weights_kernel<Rule>, table, rule,
         steps.data());
}

}  // namespace cairn::kernels::cuda
