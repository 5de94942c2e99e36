// The one place where kernels are launched: <<<>>> under nvcc, the emulator in plain C++.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cuda/device/simt.h"
#include "cuda/queue.h"
#if defined(__CUDACC__)
#include "cuda/error.h"
#endif

namespace cairn::kernels::cuda {

struct Grid {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes = 0;
};

inline constexpr int kThreads = 256;
inline constexpr std::size_t kDefaultSharedBytes = 48 << 10;
inline constexpr std::int64_t kMaxBlocks = 1 << 14;  // beyond it, blocks loop

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// A grid whose threads loop over n work items.
inline Grid grid_for(std::int64_t items, int threads = kThreads) {
  return {std::clamp<std::int64_t>(ceil_div(items, threads), 1, kMaxBlocks), threads};
}

/// A block a row, of about a thread for each `per_thread` elements. Few threads have several packs
/// each and little to wait for; 32 blocks of 64 threads fill a multiprocessor.
inline Grid grid_for_rows(std::int64_t rows, std::int64_t columns, int per_thread = 32) {
  int threads = 32;
  while (threads < 512 && std::int64_t{threads} * per_thread < columns) threads *= 2;
  return {std::min(rows, kMaxBlocks * 64), threads};
}

template <class... Parameters, class... Args>
void launch(const Queue& queue, const Grid& grid, void (*kernel)(Parameters...), Args&&... args) {
#if defined(__CUDACC__)
  if (grid.shared_bytes > kDefaultSharedBytes) {  // more has to be asked for
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(grid.shared_bytes)),
               queue.op(), "cudaFuncSetAttribute");
  }
  kernel<<<static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.threads),
           grid.shared_bytes, static_cast<cudaStream_t>(queue.stream())>>>(
      static_cast<Parameters>(args)...);
#else
  simt::launch({dim3(static_cast<unsigned>(grid.blocks)), dim3(static_cast<unsigned>(grid.threads)),
                grid.shared_bytes, queue.stream()},
               kernel, std::forward<Args>(args)...);
#endif
  queue.check_launch();
}

}  // namespace cairn::kernels::cuda
