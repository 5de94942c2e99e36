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

/// Elements [begin, begin + count) of a chunk.
inline UpdateChunk slice(UpdateChunk c, std::int64_t begin, std::int64_t count) {
  const auto at = [&](auto* data, DType dtype) {
    const std::int64_t bytes = begin * static_cast<std::int64_t>(core::size_of(dtype));
    return data == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(data)) + bytes;
  };
  c.gradient = at(c.gradient, c.types.gradient);
  c.weight = at(c.weight, c.types.weight);
  c.master = at(c.master, c.types.truth == Truth::joined ? DType::i16 : DType::f32);
  c.moment1 = at(c.moment1, c.types.moment);
  c.moment2 = at(c.moment2, c.types.moment);
  c.count = count;
  return c;
}

inline UpdateChunk chunk_of(const UpdateItem& item, const Chunk& chunk, const EntryScalars& scalars,
                            bool streamed) {
  const UpdateChunk all{{item.gradient_dtype, item.weight_dtype, item.moment_dtype, truth_of(item)},
                        item.gradient,
                        item.weight,
                        item.master,
                        item.moment1,
                        item.moment2,
                        item.count,
                        scalars,
                        streamed};
  return slice(all, chunk.begin, chunk.count);
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

inline std::vector<Chunk> cut(const UpdateList& list, std::int64_t chunk = kChunk) {
  return cut(
      list.items.size(), [&](std::size_t i) { return list.items[i].count; }, chunk);
}

/// Both passes, in lamb.cpp.
void update_lamb(UpdateList list, const LambOptions& options);

}  // namespace cpu
}  // namespace cairn::kernels
