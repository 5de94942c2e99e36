#include "sharding/gather_weights.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "cairn/core/memory.h"
#include "cairn/parallel/flatten.h"

namespace cairn::parallel {
namespace {

using core::ShardedWeight;

constexpr std::size_t kChunkBytes = std::size_t{25} << 20;

/// Part `rank` of each.
std::vector<TensorView> parts_of(const std::vector<ShardedWeight>& weights, int rank,
                                 int world_size) {
  std::vector<TensorView> parts;
  for (const ShardedWeight& sharded : weights) {
    TensorView weight = sharded.weight;
    weight.version = nullptr;
    parts.push_back(core::part_of(weight, sharded.part(rank, world_size)));
  }
  return parts;
}

std::int64_t elements_of(const std::vector<TensorView>& views) {
  std::int64_t elements = 0;
  for (const TensorView& view : views) elements += view.numel();
  return elements;
}

/// Weights of one dtype and device.
void gather_chunk(const std::vector<ShardedWeight>& chunk, const ProcessGroup& group) {
  const int world_size = group.world_size();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank)
    counts[static_cast<std::size_t>(rank)] = elements_of(parts_of(chunk, rank, world_size));
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  const Tensor& first = chunk.front().weight;
  const core::MemoryCategoryGuard category(core::MemoryCategory::communication);
  const Tensor own = flatten(parts_of(chunk, group.rank(), world_size));
  const Tensor all = Tensor::empty({total}, first.dtype(), first.device());
  group.all_gather(own, all, counts, "weights " + first.name() + " ...");
  std::int64_t at = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::int64_t end = at + counts[static_cast<std::size_t>(rank)];
    if (rank != group.rank()) {
      unflatten(all.view().slice(0, at, end), parts_of(chunk, rank, world_size));
    }
    at = end;
  }
}

}  // namespace

void gather_weights(const std::vector<ShardedWeight>& weights, const ProcessGroup& group) {
  std::vector<ShardedWeight> left = weights;
  while (!left.empty()) {
    std::vector<ShardedWeight> chunk, rest;
    std::size_t bytes = 0;
    for (ShardedWeight& one : left) {
      const Tensor& first = chunk.empty() ? one.weight : chunk.front().weight;
      const bool alike =
          one.weight.dtype() == first.dtype() && one.weight.device() == first.device();
      const bool fits = chunk.empty() || bytes + one.weight.nbytes() <= kChunkBytes;
      if (alike && fits) bytes += one.weight.nbytes();
      (alike && fits ? chunk : rest).push_back(std::move(one));
    }
    gather_chunk(chunk, group);
    left = std::move(rest);
  }
}

}  // namespace cairn::parallel
