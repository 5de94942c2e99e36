#include "cairn/parallel/flatten.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "reducer/memory_view.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{25} << 20;

std::int64_t total(const std::vector<TensorView>& tensors) {
  std::int64_t elements = 0;
  for (const TensorView& x : tensors) elements += x.numel();
  return elements;
}

void check_alike(const std::vector<TensorView>& tensors) {
  CAIRN_CHECK(!tensors.empty(), "flatten", "expected at least one tensor, got none");
  for (const TensorView& x : tensors) {
    CAIRN_CHECK(x.is_dense(), "flatten", "expected dense tensors, got shape ", x.shape,
                " with strides ", x.strides);
    CAIRN_CHECK(x.dtype == tensors[0].dtype && x.device == tensors[0].device, "flatten",
                "expected one dtype and device, got ", tensors[0].dtype, " on ", tensors[0].device,
                " and ", x.dtype, " on ", x.device);
  }
}

void check_flat(const TensorView& flat, const std::vector<TensorView>& tensors) {
  check_alike(tensors);
  CAIRN_CHECK(flat.dims() == 1 && flat.is_contiguous() && flat.numel() == total(tensors), "flatten",
              "expected a flat buffer of ", total(tensors), " elements, got shape ", flat.shape);
}

void scaled_copy(const TensorView& x, double scale, const TensorView& y) {
  scale == 1.0 ? kernels::copy(x, y) : kernels::affine(x, scale, 0.0, y);
}

/// Tensors of one dtype and device that travel together.
void broadcast_chunk(const NamedTensors& chunk, const ProcessGroup& group, int root) {
  const std::string& first = chunk.front().name;
  if (chunk.size() == 1) {
    group.broadcast(memory_of(chunk[0].tensor), root, first);
    return chunk[0].tensor.storage()->bump_version();
  }
  std::vector<TensorView> views;
  for (const NamedTensor& x : chunk) views.push_back(x.tensor);
  const Tensor flat = flatten(views);
  group.broadcast(flat, root, first + " ... " + chunk.back().name);
  unflatten(flat, views);
}

}  // namespace

void flatten(const std::vector<TensorView>& tensors, const TensorView& flat, double scale) {
  check_flat(flat, tensors);
  std::int64_t offset = 0;
  for (const TensorView& x : tensors) {
    scaled_copy(memory_of(x), scale, flat.slice(0, offset, offset + x.numel()));
    offset += x.numel();
  }
}

Tensor flatten(const std::vector<TensorView>& tensors) {
  check_alike(tensors);
  Tensor flat = Tensor::empty({total(tensors)}, tensors[0].dtype, tensors[0].device);
  flatten(tensors, flat.view());
  return flat;
}

void unflatten(const TensorView& flat, const std::vector<TensorView>& tensors, double scale) {
  check_flat(flat, tensors);
  std::int64_t offset = 0;
  for (const TensorView& x : tensors) {
    scaled_copy(flat.slice(0, offset, offset + x.numel()), scale, memory_of(x));
    offset += x.numel();
  }
}

void broadcast_parameters(const NamedTensors& tensors, const ProcessGroup& group, int root) {
  if (group.world_size() == 1) return;
  NamedTensors left = tensors;
  while (!left.empty()) {
    NamedTensors chunk, rest;
    std::size_t bytes = 0;
    for (NamedTensor& x : left) {
      const Tensor& first = chunk.empty() ? x.tensor : chunk.front().tensor;
      const bool alike = x.tensor.dtype() == first.dtype() && x.tensor.device() == first.device();
      const bool fits = chunk.empty() || bytes + x.tensor.nbytes() <= kChunkBytes;
      if (alike && fits) bytes += x.tensor.nbytes();
      (alike && fits ? chunk : rest).push_back(std::move(x));
    }
    broadcast_chunk(chunk, group, root);
    left = std::move(rest);
  }
}

}  // namespace cairn::parallel
