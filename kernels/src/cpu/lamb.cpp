// LAMB's update: one pass over gradient, moments and weight for the norms, one over moments and
// weight for the step.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/lamb.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "cpu/update.h"
#include "cpu/update_loop.h"
#include "math/lamb.h"
#include "math/lamb_step.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// A sum in f64 of squares that are taken in f32, a pack at a time.
class PackSquares {
 public:
#if CAIRN_NO_VECTORS
  template <int N, class Io>
  HWY_INLINE void add(Io, const Pack<N>& x) {
    for (int k = 0; k < N; ++k) total_ += x.of[k] * x.of[k];
  }
  HWY_INLINE double total() const {
    return total_;
  }

 private:
  double total_ = 0.0;
#else
  HWY_INLINE PackSquares() : low_(hn::Zero(Tag())), high_(hn::Zero(Tag())) {}
  template <int N, class Io>
  HWY_INLINE void add(Io io, const Pack<N>& x) {
    Floats squares = x.of[0] * x.of[0];
    for (int k = 1; k < N; ++k) squares = fma(x.of[k], x.of[k], squares);
    squares = io.keep(squares, Floats(0.0));
    low_ = hn::Add(low_, hn::PromoteTo(d_, hn::LowerHalf(squares.raw)));
    high_ = hn::Add(high_, hn::PromoteTo(d_, hn::UpperHalf(hn::Half<TagF>(), squares.raw)));
  }
  HWY_INLINE double total() const {
    return hn::GetLane(hn::SumOfLanes(d_, hn::Add(low_, high_)));
  }

 private:
  using Tag = hn::Repartition<double, TagF>;
  Tag d_;
  hn::Vec<Tag> low_, high_;
#endif
};

template <int N>
HWY_INLINE Pack<N> directions(const math::Lamb<Real>& lamb, const Pack<N>& m, const Pack<N>& v,
                              const Pack<N>& w) {
  Pack<N> u;
  for (int k = 0; k < N; ++k) u.of[k] = lamb.direction(m.of[k], v.of[k], w.of[k]);
  return u;
}

template <class Types>
HWY_INLINE LambNorms moments_of_block(Types known, const UpdateChunk& c,
                                      const math::Lamb<Real>& lamb) {
  const Prepared prepared(c.scalars);
  PackSquares weight, update;
  const auto body = [=, &weight, &update](auto types, auto io, auto size,
                                          std::int64_t i) CAIRN_PACK_BODY {
    constexpr int N = decltype(size)::value;
    const UpdateTypes t = types.get();
    prefetch_all<N>(t, c, i);
    const Pack<N> gradient = load_pack<N>(io, t.gradient, c.gradient, i);
    const Pack<N> w = load_truth<N>(io, t, c, i);
    Pack<N> m = load_pack<N>(io, t.moment, c.moment1, i);
    Pack<N> v = load_pack<N>(io, t.moment, c.moment2, i);
    for (int k = 0; k < N; ++k) {
      lamb.update_moments(prepared(gradient.of[k], w.of[k]), m.of[k], v.of[k]);
    }
    store_pack<N>(io, m, t.moment, c.moment1, i);
    store_pack<N>(io, v, t.moment, c.moment2, i);
    if (t.moment == DType::bf16) {  // as the second pass will see them
      m = load_pack<N>(io, t.moment, c.moment1, i);
      v = load_pack<N>(io, t.moment, c.moment2, i);
    }
    weight.add(io, w);
    update.add(io, directions(lamb, m, v, w));
  };
  for_packs(known, c, body);
  return {weight.total(), update.total()};
}

/// Its blocks one after another.
void LambMomentsChunk(const UpdateChunk& c, const LambOptions& options, LambNorms& norms) {
  const math::Lamb<Real> lamb(options);
  norms = {0.0, 0.0};
  with_types(c.types, [&](auto types) HWY_ATTR {
    for (std::int64_t at = 0; at < c.count; at += kSumBlock) {
      const UpdateChunk block = cpu::slice(c, at, std::min(kSumBlock, c.count - at));
      const LambNorms found = moments_of_block(types, block, lamb);
      norms.weight += found.weight;
      norms.update += found.update;
    }
  });
}

void LambWeightsChunk(const UpdateChunk& c, const LambOptions& options) {
  const math::Lamb<Real> lamb(options);
  const Real length(c.scalars.of_norm);
  const auto body = [=](auto types, auto io, auto size, std::int64_t i) CAIRN_PACK_BODY {
    constexpr int N = decltype(size)::value;
    const UpdateTypes t = types.get();
    prefetch_truth<N>(t, c, i);
    prefetch<N>(c.moment1, t.moment, i);
    prefetch<N>(c.moment2, t.moment, i);
    Pack<N> w = load_truth<N>(io, t, c, i);
    const Pack<N> m = load_pack<N>(io, t.moment, c.moment1, i);
    const Pack<N> v = load_pack<N>(io, t.moment, c.moment2, i);
    const Pack<N> u = directions(lamb, m, v, w);
    for (int k = 0; k < N; ++k) w.of[k] = w.of[k] - length * u.of[k];
    store_truth<N>(io, w, t, c, i);
  };
  with_types(c.types, [&](auto types) HWY_ATTR { for_update_packs(types, c, body); });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(LambMomentsChunk);
HWY_EXPORT(LambWeightsChunk);

void CpuBackend::lamb_moments(const UpdateList& list, const LambOptions& options,
                              TensorCheck* checks) const {
  const std::vector<cpu::Chunk> chunks = cpu::cut(list, kSumChunk);
  std::vector<LambNorms> parts(chunks.size());
  cpu::for_each_chunk(list, chunks, options, [&](const UpdateChunk& chunk, std::size_t k) {
    HWY_DYNAMIC_DISPATCH(LambMomentsChunk)(chunk, options, parts[k]);
  });
  std::fill_n(checks, 2 * list.items.size(), TensorCheck{});
  for (std::size_t k = 0; k < chunks.size(); ++k) {
    checks[2 * chunks[k].tensor].power_sum += parts[k].weight;
    checks[2 * chunks[k].tensor + 1].power_sum += parts[k].update;
  }
}

void CpuBackend::lamb_weights(const UpdateList& list, const LambOptions& options) const {
  cpu::for_each_chunk(list, cpu::cut(list), options, [&](const UpdateChunk& chunk, std::size_t) {
    HWY_DYNAMIC_DISPATCH(LambWeightsChunk)(chunk, options);
  });
}

void cpu::update_lamb(UpdateList list, const LambOptions& options) {
  const CpuBackend backend;
  std::vector<TensorCheck> checks(2 * list.items.size());
  backend.lamb_moments(list, options, checks.data());
  for (std::size_t i = 0; i < list.items.size(); ++i) {
    const LambNorms norms{checks[2 * i].power_sum, checks[2 * i + 1].power_sum};
    list.items[i].norm = lamb_step(options.lr, is_adaptive(options), norms);
  }
  backend.lamb_weights(list, options);
}

}  // namespace cairn::kernels
#endif
