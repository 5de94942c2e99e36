// fill and copy (with conversion) within the host's memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/copy.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cstring>

#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

template <class T, class U>
void convert_floats(const T* x, U* y, std::int64_t n) {
  for_vectors<Compute2<T, U>>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(io.load(x + i), y + i); });
}

void ConvertFloats(DType from, DType to, const void* x, void* y, std::int64_t n) {
  core::dispatch_floating(from, "copy", [&](auto a) {
    core::dispatch_floating(to, "copy", [&](auto b) {
      convert_floats(static_cast<const decltype(a)*>(x), static_cast<decltype(b)*>(y), n);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(ConvertFloats);

namespace {

template <class U, class T>
U convert(T x) {
  constexpr bool from_half = std::is_same_v<T, core::Half> || std::is_same_v<T, core::BFloat16>;
  constexpr bool to_half = std::is_same_v<U, core::Half> || std::is_same_v<U, core::BFloat16>;
  if constexpr (from_half) {
    return convert<U>(static_cast<float>(x));
  } else if constexpr (to_half) {
    return U(static_cast<float>(x));
  } else if constexpr (std::is_same_v<U, bool>) {
    return x != T{};
  } else {
    return static_cast<U>(x);
  }
}

template <class T, class U>
void convert_run(const T* x, U* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = convert<U>(x[i]);
}

void convert_block(DType from, DType to, const void* x, void* y, std::int64_t n) {
  if (from == to) {
    std::memcpy(y, x, static_cast<std::size_t>(n) * core::size_of(from));
  } else if (core::is_floating(from) && core::is_floating(to)) {
    HWY_DYNAMIC_DISPATCH(ConvertFloats)(from, to, x, y, n);
  } else {
    core::dispatch_all(from, [&](auto a) {
      core::dispatch_all(to, [&](auto b) {
        convert_run(static_cast<const decltype(a)*>(x), static_cast<decltype(b)*>(y), n);
      });
    });
  }
}

}  // namespace

void CpuBackend::fill(View y, double value) const {
  core::dispatch_all(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T element = convert<T>(value);
    cpu::for_each_run({cpu::out(y)}, [&](void* const* data, std::int64_t n, std::int64_t) {
      std::fill_n(static_cast<T*>(data[0]), n, element);
    });
  });
}

void CpuBackend::copy(View x, View y) const {
  if (x.data == y.data && x.dtype == y.dtype && x.strides == y.strides) return;
  cpu::for_each_run({cpu::in(x), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      convert_block(x.dtype, y.dtype, data[0], data[1], n);
                    });
}

}  // namespace cairn::kernels
#endif
