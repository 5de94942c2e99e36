#include "ddp/bucket_plan.h"

#include <algorithm>
#include <unordered_set>

namespace cairn::parallel {
namespace {

using Buffer = optim::GradientArena::Buffer;

std::int64_t bytes_between(const Buffer& buffer, std::size_t first_slot, std::size_t last_slot) {
  const auto& first = buffer.slots[first_slot];
  const auto& last = buffer.slots[last_slot - 1];
  return (last.offset + last.numel - first.offset) *
         static_cast<std::int64_t>(core::size_of(buffer.data.dtype()));
}

/// The slots of an arena that a bucket may hold.
class Chosen {
 public:
  Chosen(const optim::GradientArena& arena, const NamedTensors& parameters) : arena_(&arena) {
    for (const NamedTensor& parameter : parameters) ids_.insert(parameter.tensor.id());
  }
  bool contains(const Buffer& buffer, std::size_t slot) const {
    return ids_.contains(arena_->parameters()[buffer.slots[slot].parameter].tensor.id());
  }

 private:
  const optim::GradientArena* arena_;
  std::unordered_set<const void*> ids_;
};

/// One behind the last slot that still fits.
std::size_t bucket_end(const Buffer& buffer, const Chosen& chosen, std::size_t first_slot,
                       std::int64_t cap) {
  std::size_t end = first_slot + 1;
  while (end < buffer.slots.size() && chosen.contains(buffer, end) &&
         bytes_between(buffer, first_slot, end + 1) <= cap) {
    ++end;
  }
  return end;
}

std::string name_of(const optim::GradientArena& arena, const Buffer& buffer, std::size_t first_slot,
                    std::size_t last_slot) {
  const auto parameter = [&](std::size_t slot) {
    return arena.parameters()[buffer.slots[slot].parameter].name;
  };
  const std::string first = "gradients " + parameter(first_slot);
  return last_slot - first_slot == 1 ? first : first + " ... " + parameter(last_slot - 1);
}

}  // namespace

std::vector<PlannedBucket> plan_buckets(const optim::GradientArena& arena,
                                        const NamedTensors& parameters,
                                        const DistributedOptions& options) {
  const Chosen chosen(arena, parameters);
  std::vector<PlannedBucket> buckets;
  for (std::size_t b = 0; b < arena.buffers().size(); ++b) {
    const Buffer& buffer = arena.buffers()[b];
    std::int64_t cap = options.first_bucket_bytes;
    for (std::size_t first = 0; first < buffer.slots.size();) {
      if (!chosen.contains(buffer, first)) {
        ++first;
        continue;
      }
      const std::size_t end = bucket_end(buffer, chosen, first, cap);
      const auto& last = buffer.slots[end - 1];
      const TensorView gradients =
          buffer.data.view().slice(0, buffer.slots[first].offset, last.offset + last.numel);
      buckets.push_back({b, first, end, gradients, name_of(arena, buffer, first, end)});
      first = end;
      cap = options.bucket_bytes;
    }
  }
  // A backward reaches the parameter that was registered first last of all.
  const auto completes = [&](const PlannedBucket& bucket) {
    return arena.buffers()[bucket.buffer].slots[bucket.last_slot - 1].parameter;
  };
  std::stable_sort(
      buckets.begin(), buckets.end(),
      [&](const PlannedBucket& a, const PlannedBucket& b) { return completes(a) > completes(b); });
  return buckets;
}

}  // namespace cairn::parallel
