// The cells read and write each element once; the loops' products are by a packed weight.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/lstm.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/lstm_units.h"
#include "cpu/packed_product.h"
#include "cpu/simd.h"
#include "lstm_loop.h"
#include "math/lstm.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class V, class IO, class T>
HWY_INLINE math::LstmGates<V> load_gates(IO io, const T* p, std::int64_t stride) {
  return {io.load(p), io.load(p + stride), io.load(p + 2 * stride), io.load(p + 3 * stride)};
}
template <class V, class IO, class T>
HWY_INLINE void store_gates(IO io, const math::LstmGates<V>& gates, T* p, std::int64_t stride) {
  io.store(gates.i, p);
  io.store(gates.f, p + stride);
  io.store(gates.g, p + 2 * stride);
  io.store(gates.o, p + 3 * stride);
}

template <class T>
void run_units(const LstmUnits& a) {
  using V = Compute<T>;
  const std::int64_t H = a.hidden_size;
  T* gates = static_cast<T*>(a.gates);
  const auto* hidden = static_cast<const Wide<T>*>(a.hidden);
  auto* carry = static_cast<Wide<T>*>(a.carry);
  const T* h_before = static_cast<const T*>(a.h_before);
  T* h = static_cast<T*>(a.h);
  T* c = static_cast<T*>(a.c);
  if (!a.inside) {
    for_vectors<V>(a.count, [&](auto io, std::int64_t i) HWY_ATTR {
      io.store(io.load(h_before + i), h + i);
      io.store(io.load(carry + i), c + i);
    });
    return;
  }
  for_vectors<V>(a.count, [&](auto io, std::int64_t i) HWY_ATTR {
    const auto x = load_gates<V>(io, gates + i, H), y = load_gates<V>(io, hidden + i, H);
    const auto all = math::LstmGates<V>{x.i + y.i, x.f + y.f, x.g + y.g, x.o + y.o}.activated();
    const math::LstmUnit<V> unit = math::lstm_unit(all, io.load(carry + i));
    store_gates(io, all, gates + i, H);
    io.store(unit.c, carry + i);
    io.store(unit.c, c + i);
    io.store(unit.h, h + i);
  });
}

template <class T>
void run_units_backward(const LstmUnitsBackward& a) {
  using V = Compute<T>;
  const std::int64_t H = a.hidden_size;
  T* gates = static_cast<T*>(a.gates);
  const T* c_before = static_cast<const T*>(a.c_before);
  const T* c = static_cast<const T*>(a.c);
  const T* dy = static_cast<const T*>(a.dy);
  auto* dh = static_cast<Wide<T>*>(a.dh);
  auto* dc = static_cast<Wide<T>*>(a.dc);
  const V zero(0.0);
  if (!a.inside) {
    for_vectors<V>(a.count, [&](auto io, std::int64_t i) HWY_ATTR {
      store_gates(io, math::LstmGates<V>{zero, zero, zero, zero}, gates + i, H);
      io.store(io.load(dh + i) + io.load(dy + i), dh + i);
    });
    return;
  }
  for_vectors<V>(a.count, [&](auto io, std::int64_t i) HWY_ATTR {
    const auto d = math::lstm_unit_backward(load_gates<V>(io, gates + i, H), io.load(c_before + i),
                                            io.load(c + i), io.load(dh + i) + io.load(dy + i),
                                            io.load(dc + i));
    store_gates(io, d.gates, gates + i, H);
    io.store(zero, dh + i);
    io.store(d.c_before, dc + i);
  });
}

void RunLstmUnits(const LstmUnits& a) {
  core::dispatch_floating(a.dtype, "lstm", [&](auto zero) { run_units<decltype(zero)>(a); });
}

void RunLstmUnitsBackward(const LstmUnitsBackward& a) {
  core::dispatch_floating(a.dtype, "lstm_backward",
                          [&](auto zero) { run_units_backward<decltype(zero)>(a); });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(RunLstmUnits);
HWY_EXPORT(RunLstmUnitsBackward);

namespace {

constexpr std::int64_t kUnitsPerChunk = 1024;  // five exponentials each

/// run(b, j, count) for the units [j, j + count) of sequence b, all of [B, H].
template <class Run>
void for_each_units(const TensorView& state, const Run& run) {
  const std::int64_t H = state.size(1);
  core::parallel_for(state.numel(), kUnitsPerChunk, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t j = at % H, count = std::min(end - at, H - j);
      run(at / H, j, count);
      at += count;
    }
  });
}

void* at(const TensorView& view, std::int64_t b, std::int64_t j) {
  return view.as<char>() +
         (b * view.size(1) + j) * static_cast<std::int64_t>(core::size_of(view.dtype));
}

bool is_inside(const LstmStep& step, std::int64_t b) {
  return !step.lengths.defined() || step.t < step.lengths.as<std::int64_t>()[b];
}

}  // namespace

void CpuBackend::lstm_cell(View gates, View hidden, View carry, View h_before, View h, View c,
                           const LstmStep& step) const {
  for_each_units(h, [&](std::int64_t b, std::int64_t j, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(RunLstmUnits)
    ({gates.dtype, count, h.size(1), is_inside(step, b), at(gates, b, j), at(hidden, b, j),
      at(carry, b, j), at(h_before, b, j), at(h, b, j), at(c, b, j)});
  });
}

void CpuBackend::lstm_cell_backward(View gates, View c_before, View c, View dy, View dh, View dc,
                                    const LstmStep& step) const {
  for_each_units(c, [&](std::int64_t b, std::int64_t j, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(RunLstmUnitsBackward)
    ({gates.dtype, count, c.size(1), is_inside(step, b), at(gates, b, j), at(c_before, b, j),
      at(c, b, j), at(dy, b, j), at(dh, b, j), at(dc, b, j)});
  });
}

void CpuBackend::lstm(View gates, View weight, View h, View c, const LstmOptions& options) const {
  const PackedProduct product(*this, gates.size(1), weight.transpose(0, 1), false);
  lstm_loop(*this, std::cref(product), gates, h, c, options);
}

void CpuBackend::lstm_backward(View gates, View weight, View c, View dy, View dh, View dc,
                               const LstmOptions& options) const {
  const PackedProduct product(*this, gates.size(1), weight, true);
  lstm_backward_loop(*this, std::cref(product), gates, c, dy, dh, dc, options);
}

}  // namespace cairn::kernels
#endif
