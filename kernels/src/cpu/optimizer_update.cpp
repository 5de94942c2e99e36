// The updates that are one pass over their tensors, at the speed of memory; LAMB is in lamb.cpp.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/optimizer_update.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <variant>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "cpu/update.h"
#include "cpu/update_loop.h"
#include "math/device_step.h"
#include "math/found_nonfinite.h"
#include "math/update_rules.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// One pass of a rule over one chunk; LAMB needs two and lies elsewhere.
void RuleChunk(const UpdateChunk& chunk, const UpdateRule& rule) {
  std::visit(
      [&](const auto& options) HWY_ATTR {
        if constexpr (!std::is_same_v<std::decay_t<decltype(options)>, LambOptions>) {
          update_chunk(chunk, math::formula_of<Real>(options));
        }
      },
      rule);
}

void JoinRun(void* const* data, std::int64_t n) {
  const auto* weight = static_cast<const BFloat16*>(data[0]);
  const auto* remainder = static_cast<const std::int16_t*>(data[1]);
  auto* out = static_cast<float*>(data[2]);
  for_vectors<Real>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(Real(load_joined(io, weight + i, remainder + i)), out + i);
  });
}

void SplitRun(void* const* data, std::int64_t n) {
  const auto* in = static_cast<const float*>(data[0]);
  auto* weight = static_cast<BFloat16*>(data[1]);
  auto* remainder = static_cast<std::int16_t*>(data[2]);
  for_vectors<Real>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    store_split(io, io.load(in + i), weight + i, remainder + i);
  });
}

/// Masters whose roundings are the weights, nearly always all, are read and not written.
template <class T>
void reconcile(const T* weight, float* master, std::int64_t n) {
  constexpr std::int64_t kBlock = 512;
  T rounded[kBlock];
  for (std::int64_t at = 0; at < n; at += kBlock, weight += kBlock, master += kBlock) {
    const std::int64_t count = std::min(kBlock, n - at);
    for_vectors<Real>(count, [&](auto io, std::int64_t i)
                                 HWY_ATTR { io.store(Real(io.load(master + i)), rounded + i); });
    if (std::memcmp(rounded, weight, static_cast<std::size_t>(count) * sizeof(T)) == 0) continue;
    for (std::int64_t i = 0; i < count; ++i) {
      master[i] = kernels::math::reconciled(weight[i], rounded[i], master[i]);
    }
  }
}

void ReconcileRun(DType dtype, const void* weight, float* master, std::int64_t n) {
  if (dtype == DType::f16) return reconcile(static_cast<const Half*>(weight), master, n);
  reconcile(static_cast<const BFloat16*>(weight), master, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(RuleChunk);
HWY_EXPORT(JoinRun);
HWY_EXPORT(SplitRun);
HWY_EXPORT(ReconcileRun);

namespace {

void update_in_one_pass(const UpdateList& list, const UpdateRule& rule) {
  const std::vector<cpu::Chunk> chunks = cpu::cut(list);
  std::visit(
      [&](const auto& options) {
        cpu::for_each_chunk(list, chunks, options, [&](const UpdateChunk& chunk, std::size_t) {
          HWY_DYNAMIC_DISPATCH(RuleChunk)(chunk, rule);
        });
      },
      rule);
}

void update_now(const UpdateList& list, const UpdateRule& rule) {
  const auto* lamb = std::get_if<LambOptions>(&rule);
  lamb != nullptr ? cpu::update_lamb(list, *lamb) : update_in_one_pass(list, rule);
}

}  // namespace

void CpuBackend::update(const UpdateList& list, const UpdateRule& rule,
                        const DeviceStep& device) const {
  if (!device.defined()) return update_now(list, rule);
  const StepState state(device);
  if (state.skipped()) return;
  update_now(list, std::visit([&](const auto& o) { return UpdateRule(followed(o, state)); }, rule));
}

void CpuBackend::advance_step(View step, View found_inf) const {
  advance(step.as<std::int32_t>(), found_inf.as<const float>());
}

void CpuBackend::find_nonfinite(const std::vector<TensorView>& tensors,
                                const FoundNonfinite& found) const {
  std::vector<TensorCheck> checks(tensors.size());
  if (!tensors.empty()) check_tensors(tensors, 2.0, checks.data());
  FoundState(found).judge(checks.data(), std::ssize(checks));
}

void CpuBackend::join_master(View weight, View remainder, View out) const {
  cpu::for_each_run({cpu::in(weight), cpu::in(remainder), cpu::out(out)},
                    [](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(JoinRun)(data, n);
                    });
}

void CpuBackend::split_master(View in, View weight, View remainder) const {
  cpu::for_each_run({cpu::in(in), cpu::out(weight), cpu::out(remainder)},
                    [](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(SplitRun)(data, n);
                    });
}

void CpuBackend::reconcile_master(View weight, View master) const {
  core::parallel_for(master.numel(), cpu::kGrain, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(ReconcileRun)
    (weight.dtype, cpu::bytes_at(weight, begin), master.as<float>() + begin, end - begin);
  });
}

void CpuBackend::reconcile_remainder(View weight, View former, View remainder) const {
  const auto* now = weight.as<const core::BFloat16>();
  const auto* before = former.as<const core::BFloat16>();
  auto* low = remainder.as<std::int16_t>();
  core::parallel_for(remainder.numel(), cpu::kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      low[i] = math::reconciled_remainder(now[i], before[i], low[i]);
  });
}

}  // namespace cairn::kernels
#endif
