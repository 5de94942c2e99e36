// One chunk of an optimizer update, as the vector loops take it.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/loop.h"
#include "math/entry_scalars.h"

namespace cairn::kernels {

/// Where the f32 value of a weight is.
enum class Truth : std::uint8_t {
  weight,  // in the weight itself; there is no master
  master,  // in an f32 master beside it
  joined,  // in a bf16 weight and an i16 remainder; see math/master.h
};

/// What the tensors of a chunk hold; absent moments count as f32.
struct UpdateTypes {
  DType gradient, weight, moment;
  Truth truth;
  bool operator==(const UpdateTypes&) const = default;
};

// What training has most.
inline constexpr UpdateTypes kPlain{DType::f32, DType::f32, DType::f32, Truth::weight};
inline constexpr UpdateTypes kO2F16{DType::f16, DType::f16, DType::f32, Truth::master};
inline constexpr UpdateTypes kO2BF16{DType::bf16, DType::bf16, DType::f32, Truth::master};
// gradients of several backwards
inline constexpr UpdateTypes kSumsF16{DType::f32, DType::f16, DType::f32, Truth::master};
inline constexpr UpdateTypes kSumsBF16{DType::f32, DType::bf16, DType::f32, Truth::master};
inline constexpr UpdateTypes kRemainder{DType::bf16, DType::bf16, DType::f32, Truth::joined};
inline constexpr UpdateTypes kCompact{DType::bf16, DType::bf16, DType::bf16, Truth::joined};

struct UpdateChunk {
  UpdateTypes types;
  const void* gradient;
  void* weight;
  void* master;   // Truth::weight: null
  void* moment1;  // null: none
  void* moment2;
  std::int64_t count;
  EntryScalars scalars;
  bool streamed;  // a half weight beside an f32 master is written past the caches
};

namespace cpu {

/// Whether the weights of a list are more than the caches hold until they are read.
inline bool past_the_caches(const UpdateList& list) {
  std::int64_t bytes = 0;
  for (const UpdateItem& item : list.items) {
    bytes += item.count * static_cast<std::int64_t>(core::size_of(item.weight_dtype));
  }
  return bytes >= kStreamedBytes;
}

inline Truth truth_of(const UpdateItem& item) {
  if (item.master == nullptr) return Truth::weight;
  return item.master_dtype == DType::i16 ? Truth::joined : Truth::master;
}

inline UpdateChunk chunk_of(const UpdateItem& item, const Chunk& chunk, const EntryScalars& scalars,
                            bool streamed) {
  const auto at = [&](void* data, DType dtype) -> void* {
    const std::int64_t bytes = chunk.begin * static_cast<std::int64_t>(core::size_of(dtype));
    return data == nullptr ? nullptr : static_cast<char*>(data) + bytes;
  };
  return {{item.gradient_dtype, item.weight_dtype, item.moment_dtype, truth_of(item)},
          at(item.gradient, item.gradient_dtype),
          at(item.weight, item.weight_dtype),
          at(item.master, item.master_dtype),
          at(item.moment1, item.moment_dtype),
          at(item.moment2, item.moment_dtype),
          chunk.count,
          scalars,
          streamed};
}

/// Calls update(chunk, index of the chunk) for all chunks of a list, by all threads.
template <class Options, class Update>
void for_each_chunk(const UpdateList& list, const std::vector<Chunk>& chunks,
                    const Options& options, const Update& update) {
  const bool streamed = past_the_caches(list);
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          const UpdateItem& item = list.items[chunks[k].tensor];
          update(chunk_of(item, chunks[k], scalars_of(item, options), streamed), k);
        }
      });
}

inline std::vector<Chunk> cut(const UpdateList& list) {
  return cut(list.items.size(), [&](std::size_t i) { return list.items[i].count; });
}

void update_lamb(const UpdateList& list, const LambOptions& options);  // lamb.cpp

}  // namespace cpu
}  // namespace cairn::kernels
