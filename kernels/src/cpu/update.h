// One chunk of an optimizer update, as the vector loops take it.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/loop.h"
#include "entry_scalars.h"

namespace cairn::kernels {

struct UpdateChunk {
  DType gradient_dtype, weight_dtype, master_dtype, moment_dtype;
  const void* gradient;
  void* weight;
  void* master;   // null: the weight is the truth
  void* moment1;  // null: none
  void* moment2;
  std::int64_t count;
  EntryScalars scalars;
  bool streamed;  // a half weight beside an f32 master is written past the caches
};

namespace cpu {

/// Whether the weights of a list are more than the caches hold until they are read.
inline bool past_the_caches(const std::vector<UpdateEntry>& entries) {
  std::int64_t bytes = 0;
  for (const UpdateEntry& e : entries) bytes += static_cast<std::int64_t>(e.weight.nbytes());
  return bytes >= kStreamedBytes;
}

inline UpdateChunk chunk_of(const UpdateEntry& e, const Chunk& chunk, const EntryScalars& scalars,
                            bool streamed) {
  const auto at = [&](const TensorView& view) {
    return view.defined() ? const_cast<char*>(bytes_at(view, chunk.begin)) : nullptr;
  };
  return {e.gradient.dtype, e.weight.dtype, e.master.dtype, e.moment1.dtype,
          at(e.gradient),   at(e.weight),   at(e.master),   at(e.moment1),
          at(e.moment2),    chunk.count,    scalars,        streamed};
}

/// Calls update(chunk, index of the chunk) for all chunks of a list, by all threads.
template <class Options, class Update>
void for_each_chunk(const std::vector<UpdateEntry>& entries, const std::vector<Chunk>& chunks,
                    const Options& options, const Update& update) {
  const bool streamed = past_the_caches(entries);
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          const UpdateEntry& e = entries[chunks[k].tensor];
          update(chunk_of(e, chunks[k], scalars_of(e, options), streamed), k);
        }
      });
}

inline std::vector<Chunk> cut(const std::vector<UpdateEntry>& entries) {
  return cut(entries.size(), [&](std::size_t i) { return entries[i].weight.numel(); });
}

}  // namespace cpu
}  // namespace cairn::kernels
