// A list of tensors cut into chunks of a fixed size, so that threads share the list evenly and
// results do not depend on how many share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels::cpu {

inline constexpr std::int64_t kChunk = 65536;  // elements

struct Chunk {
  std::size_t tensor;
  std::int64_t begin, count;  // elements
};

/// size(i) is the number of elements of tensor i.
template <class Size>
std::vector<Chunk> cut(std::size_t tensors, const Size& size, std::int64_t chunk = kChunk) {
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < tensors; ++i) {
    const std::int64_t n = size(i);
    for (std::int64_t at = 0; at < n; at += chunk)
      chunks.push_back({i, at, std::min(chunk, n - at)});
  }
  return chunks;
}

/// The bytes of a dense view from an element on.
inline const char* bytes_at(const TensorView& view, std::int64_t element) {
  return view.as<char>() + element * static_cast<std::int64_t>(core::size_of(view.dtype));
}

}  // namespace cairn::kernels::cpu
