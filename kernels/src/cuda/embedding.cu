#include "cuda/embedding.cuh"

#include <limits>

#include "cuda/contiguous.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

/// f(T{}, W{}) with the storage types of a gradient and of what it is summed into.
template <class F>
void dispatch_two(DType gradient, DType sum, F f) {
  core::dispatch_floating(gradient, "embedding_backward", [&](auto from) {
    core::dispatch_floating(sum, "embedding_backward", [&](auto to) { f(from, to); });
  });
}

template <class... T>
bool whole_packs(std::int64_t columns) {
  return columns % pack_width<T...> == 0;
}

/// The rows of dy by token, and where each token's begin.
struct RowGroups {
  RowGroups(const Queue& queue, const Tokens& tokens)
      : memory(queue, tokens.vocabulary + 1 + 2 * tokens.rows), start(memory.data()) {
    std::int32_t* const orders[] = {start + tokens.vocabulary + 1,
                                    start + tokens.vocabulary + 1 + tokens.rows};
    const Buffer<std::int32_t> counts(queue, SortPass::kDigits * SortPass{tokens}.tiles());
    int passes = 0;
    for (int shift = 0; tokens.rows > 0 && tokens.vocabulary >> shift > 0; shift += 8, ++passes) {
      order = orders[passes % 2];
      sort(queue, {tokens, shift, passes == 0 ? nullptr : orders[(passes + 1) % 2],
                   orders[passes % 2], counts.data()});
    }
    launch(queue, grid_for(tokens.vocabulary + 1), group_starts_kernel, tokens,
           static_cast<const std::int32_t*>(order), start);
  }
  static void sort(const Queue& queue, const SortPass& pass) {
    launch(queue, {pass.tiles(), kThreads}, count_digits_kernel, pass);
    launch(queue, {1, 1024}, exclusive_scan_kernel, SortPass::kDigits * pass.tiles(), pass.counts);
    launch(queue, {pass.tiles(), 32}, scatter_kernel, pass);
  }

  Buffer<std::int32_t> memory;
  std::int32_t* start;
  const std::int32_t* order = nullptr;
};

}  // namespace

void CudaBackend::embedding(View weight, View index, View y) const {
  if (y.numel() == 0) return;
  const Queue queue("embedding", y.device);
  const Input table(*this, queue, weight);
  const Output out(*this, queue, y);
  core::dispatch_floating(y.dtype, "embedding", [&](auto type) {
    using T = decltype(type);
    const bool packs = whole_packs<T>(y.shape[1]) && packs_aligned(table.as<T>(), out.as<T>());
    launch(queue, grid_for_rows(y.shape[0], y.shape[1]), embedding_kernel<T>, y.shape[0],
           y.shape[1], packs, weight.shape[0], table.as<T>(), index.as<std::int64_t>(),
           index.strides[0], out.as<T>());
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
  const Tokens tokens{rows, vocabulary, index.as<std::int64_t>(), index.strides[0]};
  const RowGroups groups(queue, tokens);
  const TokenRuns runs{tokens, groups.start, groups.order};
  dispatch_two(dy.dtype, dweight.dtype, [&](auto type, auto weight_type) {
    using T = decltype(type);
    using W = decltype(weight_type);
    W* const to = out.view().as<W>();
    const bool packs = whole_packs<T, W>(columns) && packs_aligned(grad.as<T>(), to);
    const Buffer<Arithmetic<T>> sums(queue, runs.slots() * columns);  // of pieces
    if (runs.slots() > 0) {
      launch(queue, grid_for_rows(runs.slots(), columns), embedding_pieces_kernel<T>, runs, columns,
             packs, grad.as<T>(), sums.data());
    }
    launch(queue, grid_for_rows(vocabulary, columns), embedding_backward_kernel<T, W>, runs,
           columns, packs, grad.as<T>(), static_cast<const Arithmetic<T>*>(sums.data()), to,
           accumulate);
  });
  out.finish();
}

}  // namespace cairn::kernels
