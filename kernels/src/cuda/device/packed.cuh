// Memory access 16 bytes at a time, where the address allows it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/device/convert.cuh"

namespace cairn::kernels::cuda {

/// N elements in registers.
template <class T, int N>
struct Packed {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

/// Elements a thread moves at once: 16 bytes of the narrowest type, and so whole 16 bytes of each.
template <class... T>
inline constexpr int pack_width = static_cast<int>(16 / std::min({sizeof(T)...}));

/// What one instruction moves.
struct alignas(16) Sixteen {
  std::uint32_t words[4];
};

#if defined(__CUDACC__)
__device__ __forceinline__ Sixteen load_16(const void* address) {
  __builtin_assume(__isGlobal(address));  // pointers out of a table could point anywhere
  const uint4 words = *static_cast<const uint4*>(address);
  return {{words.x, words.y, words.z, words.w}};
}
/// The intrinsic keeps the 16 bytes together: the compiler splits a plain store into its elements.
__device__ __forceinline__ void store_16(void* address, const Sixteen& value) {
  __stwb(static_cast<uint4*>(address),
         make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]));
}
#else
inline Sixteen load_16(const void* address) {
  simt::require_aligned(address, 16);
  Sixteen value;
  memcpy(&value, address, 16);
  return value;
}
inline void store_16(void* address, const Sixteen& value) {
  simt::require_aligned(address, 16);
  memcpy(address, &value, 16);
}
#endif

template <int N, class T>
__device__ __forceinline__ Packed<T, N> load_pack(const T* address) {
  static_assert(sizeof(T) * N % 16 == 0);
  constexpr int kEach = static_cast<int>(16 / sizeof(T));
  Packed<T, N> pack;
  SIMT_UNROLL
  for (int k = 0; k < N; k += kEach) {
    const Sixteen part = load_16(address + k);
    memcpy(static_cast<void*>(pack.values + k), &part, 16);
  }
  return pack;
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T* address, const Packed<T, N>& pack) {
  static_assert(sizeof(T) * N % 16 == 0);
  constexpr int kEach = static_cast<int>(16 / sizeof(T));
  SIMT_UNROLL
  for (int k = 0; k < N; k += kEach) {
    Sixteen part;
    memcpy(&part, pack.values + k, 16);
    store_16(address + k, part);
  }
}

/// Whether packs may be read from and written to the addresses; absent ones do not mind.
template <class... T>
__device__ __host__ inline bool packs_aligned(const T*... addresses) {
  return ((std::uintptr_t{0} | ... | reinterpret_cast<std::uintptr_t>(addresses)) & 15u) == 0;
}

template <class A, int N, class T>
__device__ __forceinline__ Packed<A, N> widened(const Packed<T, N>& pack) {
  Packed<A, N> result;
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) result[k] = static_cast<A>(widen(pack[k]));
  return result;
}
template <class T, int N, class A>
__device__ __forceinline__ Packed<T, N> narrowed(const Packed<A, N>& values) {
  Packed<T, N> pack;
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) pack[k] = narrow<T>(values[k]);
  return pack;
}

/// Elements from i on of memory that may be absent, widened.
template <class A, class T>
__device__ __forceinline__ A element_or(const T* x, std::int64_t i, A absent) {
  return x != nullptr ? static_cast<A>(widen(x[i])) : absent;
}
template <int N, class A, class T>
__device__ __forceinline__ Packed<A, N> pack_or(const T* x, std::int64_t i, A absent) {
  if (x != nullptr) return widened<A>(load_pack<N>(x + i));
  Packed<A, N> result;
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) result[k] = absent;
  return result;
}

/// Elements before the first address at which packs are aligned; n if none of the n elements is.
template <class T>
__device__ __forceinline__ std::int64_t elements_to_alignment(const T* address, std::int64_t n) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(address) % 16;
  const auto head = static_cast<std::int64_t>(misaligned == 0 ? 0 : (16 - misaligned) / sizeof(T));
  return head < n ? head : n;
}

/// Where packs start in a row of n elements that lies at all these addresses: n where their
/// alignments differ. Absent ones do not mind.
template <class T, class... Others>
__device__ __forceinline__ std::int64_t common_head(std::int64_t n, const T* first,
                                                    const Others*... others) {
  const std::int64_t head = elements_to_alignment(first, n);
  return (packs_aligned(others == nullptr ? others : others + head...)) ? head : n;
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

/// n elements by the threads of the grid: whole packs, where there are any, then single elements.
template <int N, class One, class Pack>
__device__ __forceinline__ void visit_grid(std::int64_t n, bool packs, One one, Pack pack) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t whole = packs ? n / N : 0;
  for (std::int64_t i = first; i < whole; i += step) pack(i * N);
  for (std::int64_t i = whole * N + first; i < n; i += step) one(i);
}

}  // namespace cairn::kernels::cuda
