// A small SIMT machine in plain C++: runs device code on the host, so that every CUDA kernel of
// Cairn is executed and checked on machines without a GPU, under AddressSanitizer and
// UndefinedBehaviorSanitizer.
//
// Threads of a block are fibers (ucontext). A fiber runs until it waits (barrier, shuffle, ballot)
// or ends; blocks run one after another. The schedule is deterministic; Order::reverse and
// Order::shuffled visit threads and blocks in other orders, so a missing barrier, or blocks that
// depend on each other, give different results. What the machine reports by throwing simt::Error:
//   - a barrier that not all threads of the block reach, or that they reach at different places
//   - shuffles and ballots whose mask names lanes that ended, do not exist or wait elsewhere; reads
//   from lanes outside the mask
//   - a launch beyond the hardware's limits (those of sm_80)
//   - asynchronous copies that nobody waits for; what they write is NaN until somebody has
// Shared memory is allocated exactly, afresh for each block, filled with 0xff (NaN), so
// AddressSanitizer sees every overrun.
//
//   simt::launch({.grid = 4, .block = 128}, scale_kernel<float>, n, x, y);
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cairn::simt {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Order { forward, reverse, shuffled };

struct Schedule {
  Order order = Order::forward;
  std::uint64_t seed = 1;  // of the shuffled order
};

/// The schedule of the calling thread's launches.
inline Schedule& schedule() {
  static thread_local Schedule current;
  return current;
}

/// Shared memory that a block may have, dynamic memory included: 163 KiB as on sm_80, or what a
/// smaller GPU has. Of all threads.
std::size_t shared_limit();
void set_shared_limit(std::size_t bytes);

struct Launch {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  void* stream = nullptr;
};

/// A kernel with its own copy of the parameters, as a GPU gets them.
struct Kernel {
  std::shared_ptr<const void> parameters;
  std::size_t bytes = 0;
  void (*call)(const void* parameters) = nullptr;
};

inline constexpr unsigned kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;
using Site = std::source_location;

/// Throws Error where the address is not a multiple of `bytes`.
void require_aligned(const void* address, std::size_t bytes);

/// The tensor cores' work, with the layouts of PTX's ldmatrix (.x4, each lane gives the address of
/// a row) and mma.m16n8k16 (halves in pairs, f32 sums). Of whole warps.
void load_matrices(const void* row, bool transposed, std::uint32_t (&words)[4], const Site& site);
void multiply_matrices(float (&sums)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                       float (*widen)(std::uint16_t), const Site& site);

/// PTX's cp.async and cp.async.wait_all: 16 bytes to shared memory arrive when their thread waits.
void copy_async(void* to, const void* from, const Site& site);
void wait_for_copies();

/// Kernels started by the calling thread so far.
inline std::uint64_t& launch_count() {
  static thread_local std::uint64_t count = 0;
  return count;
}

}  // namespace cairn::simt

#include "simt/emulator_machine.h"

namespace cairn::simt {

/// Where launches go. The emulator runs them at once (launch_at_once.cpp), a simulated GPU in
/// stream order.
void submit(const Launch& shape, Kernel kernel);

/// Runs kernel(args...) for every thread of the grid.
template <class... Parameters, class... Args>
void launch(const Launch& shape, void (*kernel)(Parameters...), Args&&... args) {
  using Call = std::pair<void (*)(Parameters...), std::tuple<Parameters...>>;
  const auto call = std::make_shared<const Call>(
      kernel, std::tuple<Parameters...>(static_cast<Parameters>(args)...));
  submit(shape, {call, sizeof(Call), [](const void* parameters) {
                   const auto& [function, values] = *static_cast<const Call*>(parameters);
                   std::apply(function, values);
                 }});
}

}  // namespace cairn::simt

// The dialect: CUDA's names for what device code uses.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define SIMT_SHARED(type, name, count)                                                   \
  type* const name = static_cast<type*>(::cairn::simt::Machine::current().shared_memory( \
      [] {                                                                               \
        static char key;                                                                 \
        return &key;                                                                     \
      }(),                                                                               \
      sizeof(type) * (count)))
#define SIMT_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::cairn::simt::Machine::current().dynamic_shared_memory())

inline void __syncthreads(cairn::simt::Site site = cairn::simt::Site::current()) {
  cairn::simt::Machine::current().barrier(site);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              cairn::simt::Site site = cairn::simt::Site::current()) {
  return cairn::simt::shuffle(mask, value, width, site, [&](int lane, int base) {
    return base + (source % width + width) % width + 0 * lane;
  });
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  cairn::simt::Site site = cairn::simt::Site::current()) {
  return cairn::simt::shuffle(mask, value, width, site, [&](int lane, int base) {
    const int source = lane ^ lane_mask;
    return source < base + width ? source : lane;
  });
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32,
                   cairn::simt::Site site = cairn::simt::Site::current()) {
  return cairn::simt::shuffle(mask, value, width, site, [&](int lane, int base) {
    return lane + delta < base + width ? lane + delta : lane;
  });
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32,
                 cairn::simt::Site site = cairn::simt::Site::current()) {
  return cairn::simt::shuffle(mask, value, width, site, [&](int lane, int base) {
    return lane - delta >= base ? lane - delta : lane;
  });
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cairn::simt::Site site = cairn::simt::Site::current()) {
  return cairn::simt::Machine::current().warp_exchange(mask, predicate != 0, -1, site).votes;
}
inline int __any_sync(unsigned mask, int predicate,
                      cairn::simt::Site site = cairn::simt::Site::current()) {
  return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      cairn::simt::Site site = cairn::simt::Site::current()) {
  return __ballot_sync(mask, predicate, site) == mask;
}
inline void __syncwarp(unsigned mask = cairn::simt::kFullMask,
                       cairn::simt::Site site = cairn::simt::Site::current()) {
  __ballot_sync(mask, 0, site);
}

// One fiber runs at a time, so plain memory operations are atomic.
template <class T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, static_cast<T>(*address + value));
}
template <class T>
T atomicMax(T* address, T value) {
  return std::exchange(*address, *address < value ? value : *address);
}
template <class T>
T atomicMin(T* address, T value) {
  return std::exchange(*address, value < *address ? value : *address);
}
