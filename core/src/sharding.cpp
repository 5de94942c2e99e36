#include "cairn/core/sharding.h"

#include <algorithm>

#include "cairn/core/error.h"

namespace cairn::core {

ElementRange even_part(std::int64_t numel, int rank, int world_size) {
  CAIRN_CHECK(rank >= 0 && rank < world_size, "sharding", "expected a rank below ", world_size,
              ", got ", rank);
  const std::int64_t blocks = (numel + kPartBlock - 1) / kPartBlock;
  const auto at = [&](std::int64_t r) {
    return std::min(numel, blocks * r / world_size * kPartBlock);
  };
  return {at(rank), at(rank + 1)};
}

TensorView part_of(const TensorView& x, ElementRange part) {
  CAIRN_CHECK(x.is_dense() && part.begin >= 0 && part.begin <= part.end && part.end <= x.numel(),
              "sharding", "expected elements of a dense tensor of ", x.numel(), ", got ",
              part.begin, " to ", part.end, " of one with shape ", x.shape, " and strides ",
              x.strides);
  TensorView result(
      static_cast<char*>(x.data) + part.begin * static_cast<std::int64_t>(size_of(x.dtype)),
      {part.size()}, x.dtype, x.device);
  result.version = x.version;
  return result;
}

WeightInParts* WeightInParts::of(const Tensor& weight) {
  const TensorAttachments* attachments = weight.attachments_or_null();
  return attachments == nullptr ? nullptr : static_cast<WeightInParts*>(attachments->parts.get());
}

TensorView part_of_weight(const Tensor& weight, ElementRange part) {
  WeightInParts* parts = WeightInParts::of(weight);
  if (parts == nullptr) return part_of(weight, part);
  CAIRN_CHECK(part == parts->range(), "sharding", "expected elements of '", weight.name(),
              "' that this rank holds, ", parts->range().begin, " to ", parts->range().end,
              ", got ", part.begin, " to ", part.end);
  parts->let_go();
  TensorView result = parts->part();
  result.version = &weight.storage()->version_counter();
  return result;
}

}  // namespace cairn::core
