#include "cuda/embedding.cuh"

#include <limits>

#include "cuda/contiguous.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

void build_groups(const Queue& queue, const RowGroups& groups) {
  launch(queue, grid_for(groups.vocabulary + 1), clear_groups_kernel, groups);
  if (groups.rows > 0) launch(queue, grid_for(groups.rows), count_groups_kernel, groups);
  launch(queue, {1, 1024}, scan_groups_kernel, groups);
  if (groups.rows == 0) return;
  launch(queue, grid_for(groups.rows), fill_groups_kernel, groups);
  launch(queue, grid_for(groups.rows), order_groups_kernel, groups);
}

}  // namespace

void CudaBackend::embedding(View weight, View index, View y) const {
  if (y.numel() == 0) return;
  const Queue queue("embedding", y.device);
  const Input table(*this, queue, weight);
  const Output out(*this, queue, y);
  core::dispatch_floating(y.dtype, "embedding", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(y.shape[0], y.shape[1]), embedding_kernel<T>, y.shape[0],
           y.shape[1], weight.shape[0], table.as<T>(), index.as<std::int64_t>(), index.strides[0],
           out.as<T>());
  });
  out.finish();
}

void CudaBackend::embedding_backward(View dy, View index, View dweight, bool accumulate) const {
  if (dweight.numel() == 0) return;
  const std::int64_t rows = dy.shape[0], vocabulary = dweight.shape[0], columns = dweight.shape[1];
  CAIRN_CHECK(rows <= std::numeric_limits<std::int32_t>::max(), "embedding_backward",
              "expected at most 2^31 - 1 rows, got ", rows);
  const Queue queue("embedding_backward", dy.device);
  const Input grad(*this, queue, dy);
  const Output out(*this, queue, dweight);
  if (accumulate && out.view().data != dweight.data) copy(dweight, out.view());
  const Buffer<std::int32_t> memory(queue, 2 * vocabulary + 1 + 2 * rows);
  std::int32_t* const start = memory.data();
  const RowGroups groups{rows,
                         vocabulary,
                         index.as<std::int64_t>(),
                         index.strides[0],
                         start,
                         start + vocabulary + 1,
                         start + 2 * vocabulary + 1,
                         start + 2 * vocabulary + 1 + rows};
  build_groups(queue, groups);
  core::dispatch_floating(dy.dtype, "embedding_backward", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(vocabulary, columns), embedding_backward_kernel<T>, groups, columns,
           grad.as<T>(), AnyFloat(out.view()), accumulate);
  });
  out.finish();
}

}  // namespace cairn::kernels
