// How ranks divide the elements of a tensor among each other (ZeRO).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "cairn/core/tensor.h"

namespace cairn::core {

/// Elements [begin, end) of a dense tensor, in the order of its memory.
struct ElementRange {
  std::int64_t begin = 0, end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

inline constexpr std::int64_t kPartBlock = 1024;  // elements

/// Part `rank` of an even cut at multiples of kPartBlock, so that sums over a tensor, which are
/// sums of blocks, do not depend on the cut. Parts differ by at most a block, follow each other in
/// rank order, and may be empty. The cut depends on nothing else, so that a part stays with its
/// rank whatever becomes of the tensors beside it.
ElementRange even_part(std::int64_t numel, int rank, int world_size);

/// The same elements of a dense view: [n].
TensorView part_of(const TensorView& x, ElementRange part);

/// What is attached to a weight that ranks hold in parts (ZeRO, stage 3): this rank's part, which
/// stays, where the whole is in memory only while it is used.
class WeightInParts {
 public:
  WeightInParts(Tensor part, ElementRange range) : part_(std::move(part)), range_(range) {}
  virtual ~WeightInParts() = default;
  /// Null: the weight is whole.
  static WeightInParts* of(const Tensor& weight);

  const Tensor& part() const { return part_; }  // [n], in the weight's dtype
  const ElementRange& range() const { return range_; }
  /// Lets go of the whole: the part is all there is. Throws InvalidArgument while somebody keeps
  /// the whole.
  virtual void let_go() = 0;

 private:
  Tensor part_;
  ElementRange range_;
};

/// These elements of a weight, to be read or written: [n], of its memory, or this rank's part, of
/// which the whole is let go. Throws InvalidArgument for elements that another rank holds.
TensorView part_of_weight(const Tensor& weight, ElementRange part);

}  // namespace cairn::core
