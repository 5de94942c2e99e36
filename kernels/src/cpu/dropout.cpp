// dropout: a run of words drawn, then as many elements kept or dropped.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dropout.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

struct Philox {
  std::uint64_t seed, offset;
  std::uint32_t threshold;
  double scale;
};

constexpr std::int64_t kDraws = 512;  // elements per batch

template <class T>
void dropout_run(const Philox& philox, const T* x, T* y, std::int64_t n, std::int64_t first) {
  HWY_ALIGN std::uint32_t words[kDraws + 8 * kLanes<Floats>];
  using V = Compute<T>;
  for (std::int64_t done = 0; done < n; done += kDraws) {
    const std::int64_t count = std::min(kDraws, n - done);
    const std::int64_t at = first + done, skip = at % 4;
    for (std::int64_t k = 0; 4 * k < skip + count; k += kLanes<Floats>) {
      philox_vector(philox.seed, philox.offset, static_cast<std::uint64_t>(at / 4 + k),
                    words + 4 * k);
    }
    for_vectors<V>(count, [&](auto io, std::int64_t i) HWY_ATTR {
      const V scaled = io.load(x + done + i) * V(philox.scale);
      const auto keep = kept(io, V(0.0), words + skip + i, philox.threshold);
      io.store(select(keep, scaled, V(0.0)), y + done + i);
    });
  }
}

void DropoutRun(DType dtype, std::uint64_t seed, std::uint64_t offset, double p, void* const* data,
                std::int64_t n, std::int64_t first) {
  const Philox philox{seed, offset, kernels::math::dropout_threshold(p),
                      p < 1.0 ? 1.0 / (1.0 - p) : 0.0};
  core::dispatch_floating(dtype, "dropout", [&](auto zero) {
    using T = decltype(zero);
    dropout_run(philox, static_cast<const T*>(data[0]), static_cast<T*>(data[1]), n, first);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(DropoutRun);

void CpuBackend::dropout(View x, double p, const core::RandomDraw& draw, View y) const {
  const core::RandomDraw now = draw.resolved();
  cpu::for_each_run(
      {cpu::in(x), cpu::out(y)},
      [&](void* const* data, std::int64_t n, std::int64_t first) {
        HWY_DYNAMIC_DISPATCH(DropoutRun)(y.dtype, now.seed, now.offset, p, data, n, first);
      },
      cpu::Order::row_major);
}

}  // namespace cairn::kernels
#endif
