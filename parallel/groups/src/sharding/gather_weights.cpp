#include "sharding/gather_weights.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "cairn/core/memory.h"
#include "cairn/parallel/flatten.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kGatherBytes = std::size_t{25} << 20;
constexpr std::size_t kLargeBytes = std::size_t{1} << 20;  // a copy costs more than a collective

std::string label(const PartAndWhole& first, bool more) {
  return "weights " + first.name + (more ? " ..." : "");
}

/// Parts follow each other in rank order: the whole is what a gather makes of them.
void gather_in_place(const PartAndWhole& tensor, const ProcessGroup& group) {
  const TensorView all = core::part_of(tensor.whole, {0, tensor.whole.numel()});
  group.all_gather(tensor.part, all, tensor.counts, label(tensor, false));
}

/// Part `rank` of each whole.
std::vector<TensorView> parts_of(const std::vector<PartAndWhole>& chunk, std::size_t rank) {
  std::vector<TensorView> parts;
  for (const PartAndWhole& tensor : chunk) {
    std::int64_t begin = 0;
    for (std::size_t r = 0; r < rank; ++r) begin += tensor.counts[r];
    parts.push_back(core::part_of(tensor.whole, {begin, begin + tensor.counts[rank]}));
  }
  return parts;
}

/// Tensors of one dtype and device.
void gather_flat(const std::vector<PartAndWhole>& chunk, const ProcessGroup& group) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(group.world_size()));
  std::vector<TensorView> own;
  std::int64_t total = 0;
  for (const PartAndWhole& tensor : chunk) {
    own.push_back(tensor.part);
    for (std::size_t r = 0; r < counts.size(); ++r) counts[r] += tensor.counts[r];
    total += tensor.whole.numel();
  }
  const TensorView& first = chunk.front().whole;
  const core::MemoryCategoryGuard category(core::MemoryCategory::communication);
  const Tensor flat = flatten(own);
  const Tensor all = Tensor::empty({total}, first.dtype, first.device);
  group.all_gather(flat, all, counts, label(chunk.front(), true));
  std::int64_t at = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    unflatten(all.view().slice(0, at, at + counts[rank]), parts_of(chunk, rank));
    at += counts[rank];
  }
}

}  // namespace

std::vector<PartAndWhole> parts_in_place(const std::vector<Tensor>& weights,
                                         const ProcessGroup& group) {
  const int world_size = group.world_size();
  std::vector<PartAndWhole> parts;
  for (const Tensor& weight : weights) {
    PartAndWhole& one = parts.emplace_back();
    one.name = weight.name();
    one.whole = weight;
    one.whole.version = nullptr;
    for (int rank = 0; rank < world_size; ++rank)
      one.counts.push_back(core::even_part(weight.numel(), rank, world_size).size());
    one.part = core::part_of(one.whole, core::even_part(weight.numel(), group.rank(), world_size));
  }
  return parts;
}

void gather_parts(const std::vector<PartAndWhole>& tensors, const ProcessGroup& group) {
  std::vector<PartAndWhole> left;
  for (const PartAndWhole& tensor : tensors) {
    const bool large = tensor.whole.nbytes() >= kLargeBytes;
    large ? gather_in_place(tensor, group) : left.push_back(tensor);
  }
  while (!left.empty()) {
    std::vector<PartAndWhole> chunk, rest;
    std::size_t bytes = 0;
    for (PartAndWhole& one : left) {
      const TensorView& first = chunk.empty() ? one.whole : chunk.front().whole;
      const bool alike = one.whole.dtype == first.dtype && one.whole.device == first.device;
      const bool fits = chunk.empty() || bytes + one.whole.nbytes() <= kGatherBytes;
      if (alike && fits) bytes += one.whole.nbytes();
      (alike && fits ? chunk : rest).push_back(std::move(one));
    }
    gather_flat(chunk, group);
    left = std::move(rest);
  }
}

}  // namespace cairn::parallel
