#include "memory_loops.h"

#include <omp.h>

#include <cstring>
#include <memory>
#include <vector>

#include "cairn/core/tensor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define CAIRN_BENCH_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CAIRN_BENCH_CLONES
#endif
#define CAIRN_BENCH_INLINE inline __attribute__((always_inline))

namespace bench {
namespace {

using namespace cairn;

/// A cache line: 32 half or 16 f32 elements.
using Line = std::uint32_t __attribute__((vector_size(64)));

struct Arrays {
  Line *gradient, *weight, *master, *moment1, *moment2;
};

/// Values change in every run and are not zero: zeros may be cheaper to move.
CAIRN_BENCH_INLINE void touch(Line* lines, std::int64_t at, int count, const Line& with) {
  for (int k = 0; k < count; ++k) lines[at * count + k] += with;
}
CAIRN_BENCH_INLINE void read(const Line* lines, std::int64_t at, int count, Line& into) {
  for (int k = 0; k < count; ++k) into |= lines[at * count + k];
}
CAIRN_BENCH_INLINE void leave(Line* lines, std::int64_t at, const Line& value) {
#if defined(__x86_64__)
  __m128i parts[4];
  std::memcpy(parts, &value, sizeof(value));
  for (int k = 0; k < 4; ++k) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(lines + at) + k, parts[k]);
  }
#else
  lines[at] = value;
#endif
}

// Each visits 32 parameters a turn, from line `i` of a half tensor on.
CAIRN_BENCH_CLONES void adamw_f32(const Arrays& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    Line with{};
    read(a.gradient, i, 2, with);
    touch(a.weight, i, 2, with), touch(a.moment1, i, 2, with), touch(a.moment2, i, 2, with);
  }
}
CAIRN_BENCH_CLONES void check(const Arrays& a, std::int64_t begin, std::int64_t end) {
  Line seen{};
  for (std::int64_t i = begin; i < end; ++i) read(a.gradient, i, 1, seen);
  asm volatile("" ::"m"(seen));
}
CAIRN_BENCH_CLONES void o2(const Arrays& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    Line with = a.gradient[i];
    touch(a.master, i, 2, with), touch(a.moment1, i, 2, with), touch(a.moment2, i, 2, with);
    leave(a.weight, i, with);
  }
}
CAIRN_BENCH_CLONES void o2_compact(const Arrays& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    Line with = a.gradient[i];
    touch(a.weight, i, 1, with), touch(a.master, i, 1, with);
    touch(a.moment1, i, 1, with), touch(a.moment2, i, 1, with);
  }
}
CAIRN_BENCH_CLONES void one_moment(const Arrays& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    Line with = a.gradient[i];
    touch(a.master, i, 2, with), touch(a.moment1, i, 2, with);
    leave(a.weight, i, with);
  }
}
CAIRN_BENCH_CLONES void lamb_moments(const Arrays& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    Line with = a.gradient[i];
    read(a.master, i, 2, with);
    touch(a.moment1, i, 2, with), touch(a.moment2, i, 2, with);
  }
}
CAIRN_BENCH_CLONES void lamb_weights(const Arrays& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    Line with{};
    read(a.moment1, i, 2, with), read(a.moment2, i, 2, with);
    touch(a.master, i, 2, with);
    leave(a.weight, i, with);
  }
}

using Pass = void (*)(const Arrays&, std::int64_t begin, std::int64_t end);

void by_all_threads(Pass pass, const Arrays& arrays, std::int64_t lines) {
#pragma omp parallel
  {
    const std::int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    pass(arrays, lines * thread / threads, lines * (thread + 1) / threads);
#if defined(__x86_64__)
    _mm_sfence();
#endif
  }
}

std::vector<Pass> passes_of(Bytes bytes) {
  switch (bytes) {
    case Bytes::adamw_f32:
      return {adamw_f32};
    case Bytes::o2:
      return {check, o2};
    case Bytes::o2_compact:
      return {check, o2_compact};
    case Bytes::one_moment:
      return {one_moment};
    case Bytes::lamb:
      break;
  }
  return {lamb_moments, lamb_weights};
}

}  // namespace

std::function<void()> memory_loop(Bytes bytes, std::int64_t parameters) {
  const std::int64_t lines = parameters / 32;
  const bool wide = bytes == Bytes::adamw_f32, compact = bytes == Bytes::o2_compact;
  const auto memory = std::make_shared<std::vector<Tensor>>();
  const auto array = [&](std::int64_t lines_each) {
    memory->push_back(Tensor::full({lines * lines_each * 16}, 1.0, DType::f32));
    return static_cast<Line*>(memory->back().view().data);
  };
  Arrays arrays{};
  arrays.gradient = array(wide ? 2 : 1);
  arrays.weight = array(wide ? 2 : 1);
  if (!wide) arrays.master = array(compact ? 1 : 2);
  arrays.moment1 = array(compact ? 1 : 2);
  if (bytes != Bytes::one_moment) arrays.moment2 = array(compact ? 1 : 2);
  return [=] {
    for (Pass pass : passes_of(bytes)) by_all_threads(pass, arrays, lines);
    static_cast<void>(memory);
  };
}

}  // namespace bench
