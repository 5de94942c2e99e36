// The optimizer updates over a list of parameters in one launch: a table of pointers, cut into chunks
// of equal length, a block a chunk. Bound by memory.
#pragma once

#include "cairn/kernels/optimizer_update.h"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/table.h"
#include "math/adam.h"
#include "math/sgd.h"

namespace cairn::kernels::cuda {

struct AdamRule {
  math::Adam<float> adam;
  __device__ void operator()(float gradient, float& weight, float& moment1, float& moment2) const {
    adam.update(gradient, moment1, moment2, weight);
  }
};
struct SgdRule {
  math::Sgd<float> sgd;
  bool momentum;
  __device__ void operator()(float gradient, float& weight, float& moment1, float&) const {
    if (momentum) {
      sgd.update(gradient, moment1, weight);
    } else {
      sgd.update(gradient, weight);
    }
  }
};

/// What an update reads and writes; the truth is the master where there is one.
struct UpdateViews {
  AnyFloat gradient, weight, truth, moment1, moment2;
  bool has_master;

  __device__ explicit UpdateViews(const Slot& slot)
      : gradient(AnyFloat(slot.data[0], slot.dtype[0])),
        weight(AnyFloat(slot.data[1], slot.dtype[1])),
        truth(slot.data[2] != nullptr ? AnyFloat(slot.data[2], DType::f32) : weight),
        moment1(AnyFloat(slot.data[3], slot.dtype[3])),
        moment2(AnyFloat(slot.data[4], slot.dtype[4])),
        has_master(slot.data[2] != nullptr) {}
};

template <class Rule>
__device__ void update_pack(const Rule& rule, const UpdateViews& views, std::int64_t i) {
  const auto gradient = load_pack_or<kLanes>(views.gradient, i, 0.0f);
  auto weight = load_pack_or<kLanes>(views.truth, i, 0.0f);
  auto moment1 = load_pack_or<kLanes>(views.moment1, i, 0.0f);
  auto moment2 = load_pack_or<kLanes>(views.moment2, i, 0.0f);
  SIMT_UNROLL
  for (int k = 0; k < kLanes; ++k) rule(gradient[k], weight[k], moment1[k], moment2[k]);
  store_pack_any<kLanes>(views.weight, i, weight);
  if (views.has_master) store_pack_any<kLanes>(views.truth, i, weight);
  if (views.moment1.present()) store_pack_any<kLanes>(views.moment1, i, moment1);
  if (views.moment2.present()) store_pack_any<kLanes>(views.moment2, i, moment2);
}

template <class Rule>
__device__ void update_one(const Rule& rule, const UpdateViews& views, std::int64_t i) {
  float weight = views.truth.load<float>(i);
  float moment1 = views.moment1.load_or(i, 0.0f), moment2 = views.moment2.load_or(i, 0.0f);
  rule(views.gradient.load<float>(i), weight, moment1, moment2);
  views.weight.store(i, weight);
  if (views.has_master) views.truth.store(i, weight);
  if (views.moment1.present()) views.moment1.store(i, moment1);
  if (views.moment2.present()) views.moment2.store(i, moment2);
}

template <class Rule>
__global__ void update_kernel(Table table, Rule rule) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const UpdateViews views(slot);
  const std::int64_t begin = (blockIdx.x - std::int64_t{table.first_chunk[index]}) * kChunk;
  const std::int64_t end = smaller(begin + kChunk, slot.count);
  for (std::int64_t i = begin + threadIdx.x * kLanes; i < end; i += blockDim.x * kLanes) {
    if (i + kLanes <= end) {
      update_pack(rule, views, i);
    } else {
      for (std::int64_t k = i; k < end; ++k) update_one(rule, views, k);
    }
  }
}

}  // namespace cairn::kernels::cuda
