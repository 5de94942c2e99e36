// The optimizer updates over a list of parameters in one launch: a table of pointers, cut into
// chunks of equal length, a block a chunk. Bound by memory.
#pragma once

#include "cairn/kernels/optimizer_update.h"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/table.h"
#include "math/entry_scalars.h"
#include "math/master.h"
#include "math/update_rules.h"

namespace cairn::kernels::cuda {

/// The scalars of a list's entries: one set for all, unless there is one for each.
struct ListScalars {
  EntryScalars all;
  const EntryScalars* each;  // [slots] in device memory, or nullptr

  __device__ const EntryScalars& of(std::int32_t slot) const {
    return each != nullptr ? each[slot] : all;
  }
};

using PackedFloats = Packed<float, kLanes>;

/// A parameter's true weights: the f32 master, a bf16 weight with its remainder, or the weight.
struct Truth {
  AnyFloat weight, master;  // at most one of the two masters is present
  std::int16_t* remainder;

  __device__ explicit Truth(const Slot& slot)
      : weight(slot.data[1], slot.dtype[1]),
        master(slot.dtype[2] == DType::f32 ? slot.data[2] : nullptr, DType::f32),
        remainder(slot.dtype[2] == DType::i16 ? static_cast<std::int16_t*>(slot.data[2])
                                              : nullptr) {}

  __device__ float load(std::int64_t i) const {
    if (remainder != nullptr) return math::join_master(*weight.at<BFloat16>(i), remainder[i]);
    return master.present() ? master.load<float>(i) : weight.load<float>(i);
  }
  __device__ void store(std::int64_t i, float w) const {
    if (remainder != nullptr) {
      math::split_master(w, *weight.at<BFloat16>(i), remainder[i]);
      return;
    }
    weight.store(i, w);
    if (master.present()) master.store(i, w);
  }

  __device__ PackedFloats load_pack(std::int64_t i) const {
    if (remainder == nullptr) {
      return load_pack_or<kLanes>(master.present() ? master : weight, i, 0.0f);
    }
    PackedFloats w;
    if (!packs_remainder(i)) {
      for (int k = 0; k < kLanes; ++k) w[k] = load(i + k);
      return w;
    }
    const auto high = cuda::load_pack<kLanes>(weight.at<const BFloat16>(i));
    const auto low = cuda::load_pack<kLanes>(static_cast<const std::int16_t*>(remainder) + i);
    SIMT_UNROLL
    for (int k = 0; k < kLanes; ++k) w[k] = math::join_master(high[k], low[k]);
    return w;
  }
  __device__ void store_pack(std::int64_t i, const PackedFloats& w) const {
    if (remainder == nullptr) {
      store_pack_any<kLanes>(weight, i, w);
      if (master.present()) store_pack_any<kLanes>(master, i, w);
      return;
    }
    if (!packs_remainder(i)) {
      for (int k = 0; k < kLanes; ++k) store(i + k, w[k]);
      return;
    }
    Packed<BFloat16, kLanes> high;
    Packed<std::int16_t, kLanes> low;
    SIMT_UNROLL
    for (int k = 0; k < kLanes; ++k) math::split_master(w[k], high[k], low[k]);
    cuda::store_pack<kLanes>(weight.at<BFloat16>(i), high);
    cuda::store_pack<kLanes>(remainder + i, low);
  }

 private:
  __device__ bool packs_remainder(std::int64_t i) const {
    return pack_aligned<kLanes>(weight.at<BFloat16>(i)) && pack_aligned<kLanes>(remainder + i);
  }
};

/// What an update reads and writes.
struct UpdateViews {
  AnyFloat gradient, moment1, moment2;
  Truth truth;

  __device__ explicit UpdateViews(const Slot& slot)
      : gradient(slot.data[0], slot.dtype[0]),
        moment1(slot.data[3], slot.dtype[3]),
        moment2(slot.data[4], slot.dtype[4]),
        truth(slot) {}
};

/// One element as every rule sees it.
template <class Rule>
__device__ void apply(const Rule& rule, const EntryScalars& scalars, float gradient, float& weight,
                      float& moment1, float& moment2) {
  const float g = math::fma(scalars.l2, weight, gradient * scalars.scale);
  rule.update(g, scalars.inverse, moment1, moment2, weight);
}

template <class Rule>
__device__ void update_pack(const Rule& rule, const EntryScalars& scalars, const UpdateViews& views,
                            std::int64_t i) {
  const auto gradient = load_pack_or<kLanes>(views.gradient, i, 0.0f);
  auto weight = views.truth.load_pack(i);
  auto moment1 = load_pack_or<kLanes>(views.moment1, i, 0.0f);
  auto moment2 = load_pack_or<kLanes>(views.moment2, i, 0.0f);
  SIMT_UNROLL
  for (int k = 0; k < kLanes; ++k) {
    apply(rule, scalars, gradient[k], weight[k], moment1[k], moment2[k]);
  }
  views.truth.store_pack(i, weight);
  if (views.moment1.present()) store_pack_any<kLanes>(views.moment1, i, moment1);
  if (views.moment2.present()) store_pack_any<kLanes>(views.moment2, i, moment2);
}

template <class Rule>
__device__ void update_one(const Rule& rule, const EntryScalars& scalars, const UpdateViews& views,
                           std::int64_t i) {
  float weight = views.truth.load(i);
  float moment1 = views.moment1.load_or(i, 0.0f), moment2 = views.moment2.load_or(i, 0.0f);
  apply(rule, scalars, views.gradient.load<float>(i), weight, moment1, moment2);
  views.truth.store(i, weight);
  if (views.moment1.present()) views.moment1.store(i, moment1);
  if (views.moment2.present()) views.moment2.store(i, moment2);
}

/// The elements of a slot that a block visits.
struct Span {
  std::int64_t begin, end;
};
__device__ __host__ inline Span span_of(std::int64_t block, std::int32_t first_chunk,
                                        std::int64_t count) {
  const std::int64_t begin = (block - first_chunk) * kChunk;
  return {begin, smaller(begin + kChunk, count)};
}

/// Calls pack(i) for each whole pack of a block's span and one(i) for each element that is left.
template <class PackBody, class OneBody>
__device__ void visit_span(const Span& span, PackBody pack, OneBody one) {
  for (std::int64_t i = span.begin + threadIdx.x * kLanes; i < span.end; i += blockDim.x * kLanes) {
    if (i + kLanes <= span.end) {
      pack(i);
    } else {
      for (std::int64_t k = i; k < span.end; ++k) one(k);
    }
  }
}

/// A block's chunk.
template <class Rule>
__device__ void update_block(const Table& table, const EntryScalars& scalars, const Rule& rule) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const UpdateViews views(slot);
  visit_span(
      span_of(blockIdx.x, table.first_chunk[index], slot.count),
      [&](std::int64_t i) { update_pack(rule, scalars, views, i); },
      [&](std::int64_t i) { update_one(rule, scalars, views, i); });
}

template <class Rule>
__global__ void update_kernel(Table table, ListScalars list, Rule rule) {
  const EntryScalars scalars = list.of(table.chunk_slot[blockIdx.x]);
  update_block(table, scalars, rule);
}

}  // namespace cairn::kernels::cuda
