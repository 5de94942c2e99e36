// Copies from global to shared memory that pass no registers (sm_80's cp.async). A thread starts
// some and waits for them; a barrier then shows them to the block.
#pragma once

#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

/// 16 bytes; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if defined(__CUDACC__)
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  const Sixteen value = load_16(global);
  simt::copy_async(shared, &value, simt::Site::current());
#endif
}

/// For those that this thread started.
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  simt::wait_for_copies();
#endif
}

}  // namespace cairn::kernels::cuda
