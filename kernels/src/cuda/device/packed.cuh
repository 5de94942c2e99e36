// 128-bit memory access: N elements that load and store as one, where the address allows it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/device/convert.cuh"

namespace cairn::kernels::cuda {

template <class T, int N>
struct alignas(sizeof(T) * N) Packed {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

/// Elements a thread moves at once: 16 bytes of the widest type.
template <class... T>
inline constexpr int pack_width = static_cast<int>(16 / std::max({sizeof(T)...}));

template <int N, class T>
__device__ __forceinline__ Packed<T, N> load_pack(const T* address) {
  return *reinterpret_cast<const Packed<T, N>*>(address);
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T* address, const Packed<T, N>& pack) {
  *reinterpret_cast<Packed<T, N>*>(address) = pack;
}

/// Whether packs of N elements may be read from and written to the address.
template <int N, class T>
__device__ __host__ inline bool pack_aligned(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % (sizeof(T) * N) == 0;
}

/// N elements of memory whose dtype is known at run time; `absent` where there is none.
template <int N, class A, class T>
__device__ __forceinline__ Packed<A, N> load_widened(const T* address) {
  Packed<A, N> result;
  if (pack_aligned<N>(address)) {
    const auto pack = load_pack<N>(address);
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) result[k] = static_cast<A>(widen(pack[k]));
  } else {
    for (int k = 0; k < N; ++k) result[k] = static_cast<A>(widen(address[k]));
  }
  return result;
}
template <int N, class A>
__device__ __forceinline__ Packed<A, N> load_pack_or(const AnyFloat& x, std::int64_t i, A absent) {
  if (!x.present() || x.stride != 1) {
    Packed<A, N> result;
    for (int k = 0; k < N; ++k) result[k] = x.load_or(i + k, absent);
    return result;
  }
  switch (x.dtype) {
    case DType::f16:
      return load_widened<N, A>(x.at<const Half>(i));
    case DType::bf16:
      return load_widened<N, A>(x.at<const BFloat16>(i));
    case DType::f64:
      return load_widened<N, A>(x.at<const double>(i));
    default:
      return load_widened<N, A>(x.at<const float>(i));
  }
}

/// Stores rounded values into memory (of stride 1) whose dtype is known at run time.
template <int N, class T, class A>
__device__ __forceinline__ void store_narrowed(T* address, const Packed<A, N>& values) {
  if (pack_aligned<N>(address)) {
    Packed<T, N> pack;
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) pack[k] = narrow<T>(values[k]);
    store_pack<N>(address, pack);
  } else {
    for (int k = 0; k < N; ++k) address[k] = narrow<T>(values[k]);
  }
}
template <int N, class A>
__device__ __forceinline__ void store_pack_any(const AnyFloat& y, std::int64_t i,
                                               const Packed<A, N>& values) {
  switch (y.dtype) {
    case DType::f16:
      return store_narrowed<N>(y.at<Half>(i), values);
    case DType::bf16:
      return store_narrowed<N>(y.at<BFloat16>(i), values);
    case DType::f64:
      return store_narrowed<N>(y.at<double>(i), values);
    default:
      return store_narrowed<N>(y.at<float>(i), values);
  }
}

/// Elements before the first address at which packs are aligned; n if none of the n elements is.
template <int N, class T>
__device__ __forceinline__ std::int64_t elements_to_alignment(const T* address, std::int64_t n) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(address) % (sizeof(T) * N);
  const auto head = static_cast<std::int64_t>(misaligned == 0 ? 0 : N - misaligned / sizeof(T));
  return head < n ? head : n;
}

/// A row's pass by the threads of a block: single elements up to alignment, packs, single elements.
/// `one(i)` and `pack(i)` are called with the first element's index; every element once. head = n
/// visits all singly.
template <int N, class One, class Pack>
__device__ __forceinline__ void visit_row(std::int64_t n, std::int64_t head, One one, Pack pack) {
  const std::int64_t packs = (n - head) / N, tail = head + packs * N;
  for (std::int64_t i = threadIdx.x; i < head; i += blockDim.x) one(i);
  for (std::int64_t i = threadIdx.x; i < packs; i += blockDim.x) pack(head + i * N);
  for (std::int64_t i = tail + threadIdx.x; i < n; i += blockDim.x) one(i);
}

}  // namespace cairn::kernels::cuda
