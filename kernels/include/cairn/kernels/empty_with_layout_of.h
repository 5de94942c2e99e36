// Tensors beside another one, in its layout: masters and moments beside a weight.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/file_memory.h"
#include "cairn/core/memory.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/copy.h"

namespace cairn::kernels {

/// The same elements in the same order in memory, for views of one shape.
inline bool same_layout(const TensorView& a, const TensorView& b) {
  for (int i = 0; i < a.dims(); ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

/// Shaped and laid out like x, on its device; uninitialised.
inline Tensor empty_with_layout_of(
    const Tensor& x, DType dtype,
    core::MemoryCategory category = core::MemoryCategory::optimizer_state) {
  const core::MemoryCategoryGuard guard(category);
  return Tensor::empty_strided(x.shape(), x.strides(), dtype, x.device());
}

/// Where an optimizer keeps its state of a tensor.
struct StatePlace {
  std::string folder = {};  // in files of it, if any (core/file_memory.h)
  bool on_host = false;     // of a GPU's tensors in pinned memory of the host, as in files

  bool operator==(const StatePlace&) const = default;
  /// The device of the state of a tensor on this one.
  Device home_of(Device device) const {
    const bool leaves = device.is_cuda() && (on_host || !folder.empty());
    return leaves ? Device{} : device;
  }
};

/// State of a tensor on this device, with dense strides: in files zeros, else uninitialised. Less
/// than core::kLeastInFile bytes lie in memory.
inline Tensor empty_in(const StatePlace& place, const Shape& shape, const Strides& strides,
                       DType dtype, Device device) {
  const Device home = place.home_of(device);
  const auto bytes = static_cast<std::size_t>(shape.numel()) * core::size_of(dtype);
  if (!place.folder.empty() && bytes >= core::kLeastInFile) {
    const std::shared_ptr<void> memory = core::allocate_in_file(place.folder, bytes);
    return Tensor::wrap({memory.get(), shape, strides, dtype, home}, memory);
  }
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  if (home == device) return Tensor::empty_strided(shape, strides, dtype, device);
  const auto memory = core::Storage::allocate_pinned(bytes);
  return Tensor::wrap({memory->data(), shape, strides, dtype, home}, memory);
}

/// Elements [begin, end) of a dense view, in the order of memory.
inline TensorView run_of(const TensorView& x, std::int64_t begin, std::int64_t end) {
  TensorView part = x;
  part.shape = {end - begin};
  part.strides = {1};
  part.data = static_cast<char*>(x.data) + static_cast<std::size_t>(begin) * core::size_of(x.dtype);
  return part;
}

/// Elements of a tensor in a file that are in memory at once, where nothing needs all of them.
inline constexpr std::int64_t kFileBlock = std::int64_t{1} << 19;

/// Copies `from` (any device), converted. Of dense views of one layout as much as a block of what
/// lies in files is in memory.
inline void copy_by_blocks(const TensorView& from, const TensorView& to) {
  const bool in_files = core::lies_in_file(from) || core::lies_in_file(to);
  if (!in_files || !same_layout(from, to) || !from.is_dense()) return copy(from, to);
  for (std::int64_t begin = 0; begin < to.numel(); begin += kFileBlock) {
    const std::int64_t end = std::min(begin + kFileBlock, to.numel());
    const TensorView source = run_of(from, begin, end), target = run_of(to, begin, end);
    copy(source, target);
    core::leave_to_file(source);
    core::leave_to_file(target);
  }
}

/// The same, with these values (of x's shape, any device), converted.
inline Tensor copy_beside(const Tensor& x, const TensorView& values, DType dtype,
                          core::MemoryCategory category = core::MemoryCategory::optimizer_state) {
  Tensor result = empty_with_layout_of(x, dtype, category);
  copy(values, result);
  return result;
}

/// `values` itself where it is laid out like x, else a copy, kept alive by `temporaries`. Has x's
/// strides.
inline TensorView laid_out_like(const Tensor& x, const Tensor& values,
                                std::vector<Tensor>& temporaries) {
  if (same_layout(values, x)) {
    return {values.raw_data(), x.shape(), x.strides(), values.dtype(), values.device()};
  }
  temporaries.push_back(copy_beside(x, values, values.dtype(), core::MemoryCategory::workspace));
  return temporaries.back();
}

}  // namespace cairn::kernels
