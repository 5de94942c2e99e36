// The optimizer updates over a list of parameters in one launch: a table of pointers, cut into
// chunks of equal length, a block a chunk. Bound by memory.
#pragma once

#include <type_traits>

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

  __device__ EntryScalars of(std::int32_t slot) const { return each != nullptr ? each[slot] : all; }
};

using PackedFloats = Packed<float, kLanes>;

/// What an update reads and writes, one element at a time, of any dtypes. A parameter's true weight
/// is its f32 master, a bf16 weight with its remainder, or the weight.
struct UpdateViews {
  AnyFloat gradient, weight, master, moment1, moment2;
  std::int16_t* remainder;  // at most one of master and remainder is present

  __device__ explicit UpdateViews(const Slot& slot)
      : gradient(slot.data[0], slot.dtype[0]),
        weight(slot.data[1], slot.dtype[1]),
        master(slot.dtype[2] == DType::f32 ? slot.data[2] : nullptr, DType::f32),
        moment1(slot.data[3], slot.dtype[3]),
        moment2(slot.data[4], slot.dtype[4]),
        remainder(slot.dtype[2] == DType::i16 ? static_cast<std::int16_t*>(slot.data[2])
                                              : nullptr) {}

  __device__ float load_truth(std::int64_t i) const {
    if (remainder != nullptr) return math::join_master(*weight.at<BFloat16>(i), remainder[i]);
    return master.present() ? *master.at<float>(i) : weight.load<float>(i);
  }
  __device__ void store_truth(std::int64_t i, float w) const {
    if (remainder != nullptr) {
      math::split_master(w, *weight.at<BFloat16>(i), remainder[i]);
      return;
    }
    weight.store(i, w);
    if (master.present()) *master.at<float>(i) = w;
  }
};

/// The storage types of an entry. Master: float, std::int16_t (the remainder of a bf16 weight) or
/// None.
struct None {};
template <class Gradient_, class Weight_, class Master_, class Moment_>
struct UpdateTypes {
  using Gradient = Gradient_;
  using Weight = Weight_;
  using Master = Master_;
  using Moment = Moment_;

  __device__ static bool are_of(const Slot& slot) {
    bool same_master = slot.data[2] == nullptr;
    if constexpr (!std::is_same_v<Master, None>) {
      same_master = !same_master && slot.dtype[2] == core::dtype_of<Master>;
    }
    return slot.dtype[0] == core::dtype_of<Gradient> && slot.dtype[1] == core::dtype_of<Weight> &&
           same_master && slot.dtype[3] == core::dtype_of<Moment>;
  }
};

template <class... Types>
struct TypeList {};

/// The sets that the levels of amp and the states of the optimizers make: entries of these move in
/// packs, all others one element at a time.
using CommonUpdates =
    TypeList<UpdateTypes<float, float, None, float>, UpdateTypes<float, float, None, BFloat16>,
             UpdateTypes<BFloat16, BFloat16, float, float>, UpdateTypes<Half, Half, float, float>,
             UpdateTypes<float, BFloat16, float, float>, UpdateTypes<float, Half, float, float>,
             UpdateTypes<BFloat16, BFloat16, std::int16_t, BFloat16>,
             UpdateTypes<BFloat16, BFloat16, std::int16_t, float>,
             UpdateTypes<float, BFloat16, std::int16_t, BFloat16>,
             UpdateTypes<float, BFloat16, std::int16_t, float>,
             UpdateTypes<BFloat16, BFloat16, None, float>, UpdateTypes<Half, Half, None, float>>;

/// Calls f with the first types that an entry has; no call where it has others.
template <class F, class... Types>
__device__ __forceinline__ void with_types(const Slot& slot, TypeList<Types...>, F f) {
  (void)((Types::are_of(slot) && (f(Types{}), true)) || ...);
}

/// An entry whose types are known at compile time; kLanes elements at a time.
template <class Types>
struct TypedEntry {
  const typename Types::Gradient* gradient;
  typename Types::Weight* weight;
  typename Types::Master* master;
  typename Types::Moment* moment1;
  typename Types::Moment* moment2;

  __device__ explicit TypedEntry(const Slot& slot)
      : gradient(static_cast<const typename Types::Gradient*>(slot.data[0])),
        weight(static_cast<typename Types::Weight*>(slot.data[1])),
        master(static_cast<typename Types::Master*>(slot.data[2])),
        moment1(static_cast<typename Types::Moment*>(slot.data[3])),
        moment2(static_cast<typename Types::Moment*>(slot.data[4])) {}

  __device__ bool aligned() const {
    return packs_aligned(gradient, weight, master, moment1, moment2);
  }
  __device__ PackedFloats load_gradient(std::int64_t i) const {
    return widened<float>(load_pack<kLanes>(gradient + i));
  }
  __device__ PackedFloats load_moment(const typename Types::Moment* moment, std::int64_t i) const {
    return pack_or<kLanes>(moment, i, 0.0f);
  }
  __device__ void store_moment(typename Types::Moment* moment, std::int64_t i,
                               const PackedFloats& values) const {
    if (moment != nullptr) store_pack<kLanes>(moment + i, narrowed<typename Types::Moment>(values));
  }
  /// What a moment reads as once it is stored.
  __device__ float stored(float moment) const {
    return widen(narrow<typename Types::Moment>(moment));
  }
  __device__ PackedFloats load_truth(std::int64_t i) const {
    if constexpr (std::is_same_v<typename Types::Master, None>) {
      return widened<float>(load_pack<kLanes>(weight + i));
    } else if constexpr (std::is_same_v<typename Types::Master, float>) {
      return load_pack<kLanes>(master + i);
    } else {
      const auto high = load_pack<kLanes>(weight + i);
      const auto low = load_pack<kLanes>(master + i);
      PackedFloats w;
      SIMT_UNROLL
      for (int k = 0; k < kLanes; ++k) w[k] = math::join_master(high[k], low[k]);
      return w;
    }
  }
  __device__ void store_truth(std::int64_t i, const PackedFloats& w) const {
    if constexpr (std::is_same_v<typename Types::Master, std::int16_t>) {
      Packed<BFloat16, kLanes> high;
      Packed<std::int16_t, kLanes> low;
      SIMT_UNROLL
      for (int k = 0; k < kLanes; ++k) math::split_master(w[k], high[k], low[k]);
      store_pack<kLanes>(weight + i, high);
      store_pack<kLanes>(master + i, low);
    } else {
      store_pack<kLanes>(weight + i, narrowed<typename Types::Weight>(w));
      if constexpr (std::is_same_v<typename Types::Master, float>) {
        store_pack<kLanes>(master + i, w);
      }
    }
  }
};

/// One element as every rule sees it.
template <class Rule>
__device__ void apply(const Rule& rule, const EntryScalars& scalars, float gradient, float& weight,
                      float& moment1, float& moment2) {
  const float g = math::fma(scalars.l2, weight, gradient * scalars.scale);
  rule.update(g, scalars.of_norm, moment1, moment2, weight);
}

template <class Rule, class Types>
__device__ __forceinline__ void update_pack(const Rule& rule, const EntryScalars& scalars,
                                            const TypedEntry<Types>& entry, std::int64_t i) {
  const auto gradient = entry.load_gradient(i);
  auto weight = entry.load_truth(i);
  auto moment1 = entry.load_moment(entry.moment1, i);
  auto moment2 = entry.load_moment(entry.moment2, i);
  SIMT_UNROLL
  for (int k = 0; k < kLanes; ++k) {
    apply(rule, scalars, gradient[k], weight[k], moment1[k], moment2[k]);
  }
  entry.store_truth(i, weight);
  entry.store_moment(entry.moment1, i, moment1);
  entry.store_moment(entry.moment2, i, moment2);
}

template <class Rule>
__device__ void update_one(const Rule& rule, const EntryScalars& scalars, const UpdateViews& views,
                           std::int64_t i) {
  float weight = views.load_truth(i);
  float moment1 = views.moment1.load_or(i, 0.0f), moment2 = views.moment2.load_or(i, 0.0f);
  apply(rule, scalars, views.gradient.load<float>(i), weight, moment1, moment2);
  views.store_truth(i, weight);
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

/// A block's span of an entry: pack(entry, i) for each whole pack of common types, and one(i) for
/// each element that is left.
template <class PackBody, class OneBody>
__device__ __forceinline__ void visit_entry(const Slot& slot, const Span& span, PackBody pack,
                                            OneBody one) {
  std::int64_t left = span.begin;
  with_types(slot, CommonUpdates{}, [&](auto types) {
    const TypedEntry<decltype(types)> entry(slot);
    if (!entry.aligned()) return;
    left = span.end - (span.end - span.begin) % kLanes;
    for (std::int64_t i = span.begin + threadIdx.x * kLanes; i < left; i += blockDim.x * kLanes) {
      pack(entry, i);
    }
  });
  for (std::int64_t i = left + threadIdx.x; i < span.end; i += blockDim.x) one(i);
}

/// The same by one warp: whatever the alignment, a lane has the same elements in the same order.
template <class PackBody, class OneBody>
__device__ __forceinline__ void visit_entry_by_lanes(const Slot& slot, const Span& span,
                                                     PackBody pack, OneBody one) {
  constexpr std::int64_t kStep = 32 * kLanes;
  const std::int64_t first = span.begin + threadIdx.x % 32 * kLanes;
  bool in_packs = false;
  with_types(slot, CommonUpdates{}, [&](auto types) {
    const TypedEntry<decltype(types)> entry(slot);
    in_packs = entry.aligned();
    if (!in_packs) return;
    for (std::int64_t i = first; i + kLanes <= span.end; i += kStep) pack(entry, i);
  });
  for (std::int64_t i = first; i < span.end; i += kStep) {
    if (in_packs && i + kLanes <= span.end) continue;
    for (std::int64_t k = i; k < smaller(i + kLanes, span.end); ++k) one(k);
  }
}

/// A block's chunk.
template <class Rule>
__device__ void update_block(const Table& table, const EntryScalars& scalars, const Rule& rule) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const UpdateViews views(slot);
  visit_entry(
      slot, span_of(blockIdx.x, table.first_chunk[index], slot.count),
      [&](const auto& entry, std::int64_t i) { update_pack(rule, scalars, entry, i); },
      [&](std::int64_t i) { update_one(rule, scalars, views, i); });
}

template <class Rule>
__global__ void update_kernel(Table table, ListScalars list, Rule rule) {
  const EntryScalars scalars = list.of(table.chunk_slot[blockIdx.x]);
  update_block(table, scalars, rule);
}

}  // namespace cairn::kernels::cuda
