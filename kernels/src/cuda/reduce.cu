#include "cuda/reduce.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

constexpr std::int64_t kEnoughBlocks = 1024;

/// Distance of the closest two elements that differ in a dimension of the list.
template <int Operands>
std::int64_t closest(const Layout<Operands>& layout) {
  std::int64_t result = std::numeric_limits<std::int64_t>::max();
  for (int d = 0; d < layout.dims; ++d) result = std::min(result, layout.stride[0][d]);
  return result;
}

template <class T>
void split(ReduceTask<T>& task, std::int64_t blocks, std::int64_t least_length) {
  const std::int64_t wanted =
      std::max<std::int64_t>(kEnoughBlocks / std::max<std::int64_t>(blocks, 1), 1);
  const std::int64_t most = std::max<std::int64_t>(task.length / least_length, 1);
  task.split_length = ceil_div(task.length, std::min(wanted, most));
  task.splits =
      task.split_length == 0 ? 1 : static_cast<int>(ceil_div(task.length, task.split_length));
}

template <class T>
ReduceTask<T> make_task(ReductionKind op, const TensorView& x, const TensorView& y,
                        bool accumulate) {
  Shape kept, reduced;
  Strides kept_x, kept_y, reduced_x;
  for (int d = 0; d < x.dims(); ++d) {
    if (y.shape[d] == x.shape[d]) {
      kept.push_back(x.shape[d]), kept_x.push_back(x.strides[d]), kept_y.push_back(y.strides[d]);
    } else {
      reduced.push_back(x.shape[d]), reduced_x.push_back(x.strides[d]);
    }
  }
  ReduceTask<T> task{};
  task.x = x.as<T>(), task.y = y.data, task.y_dtype = y.dtype;
  const Strides* const kept_strides[] = {&kept_x, &kept_y};
  const Strides* const reduced_strides[] = {&reduced_x};
  task.kept = make_layout(kept, kept_strides, Visit::any_order);
  task.reduced = make_layout(reduced, reduced_strides, Visit::any_order);
  task.outputs = kept.numel(), task.length = reduced.numel();
  task.step = {op}, task.accumulate = accumulate;
  return task;
}

/// Whether the outputs lie in whole, aligned packs wherever they are reduced over.
template <class T>
bool kept_in_packs(const ReduceTask<T>& task) {
  constexpr int N = pack_width<T>;
  Layout<2> kept = task.kept;
  for (int d = 0; d < kept.dims; ++d) kept.stride[1][d] = kept.stride[0][d];  // y is not in packs
  bool whole = packs_aligned(task.x) && take_packs<N>(kept);
  for (int d = 0; d < task.reduced.dims; ++d) {
    whole = whole && task.reduced.stride[0][d] % N == 0;
  }
  return whole;
}

template <class T>
void run(const Queue& queue, ReduceTask<T> task) {
  const bool columns = closest(task.kept) < closest(task.reduced);
  const bool packs = columns && kept_in_packs(task);
  const int width = packs ? pack_columns<T> : columns ? kColumns : 1;
  const std::int64_t tiles = ceil_div(task.outputs, width);
  split(task, tiles, columns ? 64 : 2048);
  const Buffer<TotalOf<Arithmetic<T>>> partial(queue,
                                               task.splits > 1 ? task.splits * task.outputs : 0);
  task.partial = partial.data();
  const std::int64_t blocks = std::min(tiles * task.splits, kMaxBlocks);
  if (packs) {
    launch(queue, {blocks, kRowThreads * kRowLines}, reduce_pack_columns_kernel<T>, task);
  } else if (columns) {
    launch(queue, {blocks, kColumns * kLines}, reduce_columns_kernel<T>, task);
  } else {
    const int threads = grid_for_rows(1, task.split_length).threads;
    launch(queue, {blocks, threads}, reduce_rows_kernel<T>, task);
  }
  if (task.splits > 1) launch(queue, grid_for(task.outputs), reduce_splits_kernel<T>, task);
}

}  // namespace

void CudaBackend::reduce(ReductionKind op, View x, View y, bool accumulate) const {
  if (y.numel() == 0) return;
  const Queue queue("reduce", y.device);
  core::dispatch_all(
      x.dtype, [&](auto type) { run(queue, make_task<decltype(type)>(op, x, y, accumulate)); });
}

}  // namespace cairn::kernels
