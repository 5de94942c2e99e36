// check_gradients, adam_update and sgd_update: each one pass over its tensors, at the speed of
// memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/multi_tensor.cpp"
#include "cpu/targets.h"
// ---
#include <cmath>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/simd.h"
#include "cpu/update.h"
#include "math/adam.h"
#include "math/sgd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// A sum of squares in f64, where the square of no finite float overflows.
class SquareSum {
 public:
#if CAIRN_NO_VECTORS
  HWY_INLINE void add(double x) {
    total_ += x * x;
  }
  HWY_INLINE double total() const {
    return total_;
  }

 private:
  double total_ = 0.0;
#else
  HWY_INLINE SquareSum() : low_(hn::Zero(Tag())), high_(hn::Zero(Tag())) {}
  HWY_INLINE void add(Floats x) {
    const auto low = hn::PromoteTo(d_, hn::LowerHalf(x.raw));
    const auto high = hn::PromoteTo(d_, hn::UpperHalf(hn::Half<TagF>(), x.raw));
    low_ = hn::MulAdd(low, low, low_);
    high_ = hn::MulAdd(high, high, high_);
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

template <class T>
double square_sum(const T* x, std::int64_t n) {
  constexpr std::int64_t kStep = 2 * kLanes<Real>;
  SquareSum a, b;
  const Whole<Real> io;
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    a.add(io.load(x + i));
    b.add(io.load(x + i + kLanes<Real>));
  }
  for_vectors<Real>(n - i,
                    [&](auto part, std::int64_t k) HWY_ATTR { a.add(part.load(x + i + k)); });
  return a.total() + b.total();
}

/// Not finite if and only if an element is not.
double SquareSumOf(DType dtype, const void* x, std::int64_t n) {
  switch (dtype) {
    case DType::f16:
      return square_sum(static_cast<const Half*>(x), n);
    case DType::bf16:
      return square_sum(static_cast<const BFloat16*>(x), n);
    default:
      return square_sum(static_cast<const float*>(x), n);
  }
}

/// Calls f(G{}, W{}) with the types of gradient and weight.
template <class F>
void dispatch_chunk(const UpdateChunk& chunk, const F& f) {
  const auto visit = [](DType dtype, const auto& g) {
    switch (dtype) {
      case DType::f16:
        return g(Half{});
      case DType::bf16:
        return g(BFloat16{});
      default:
        return g(float{});
    }
  };
  visit(chunk.gradient_dtype, [&](auto g) { visit(chunk.weight_dtype, [&](auto w) { f(g, w); }); });
}

/// Calls update(g, w, io, i) for each vector with the gradient and the weight's true value, and
/// stores the latter back.
template <class G, class W, class Update>
HWY_INLINE void update_weights(const UpdateChunk& chunk, const Update& update) {
  const G* gradient = static_cast<const G*>(chunk.gradient);
  W* weight = static_cast<W*>(chunk.weight);
  float* master = chunk.master;
  if (master == nullptr) {
    for_vectors<Real>(chunk.count, [&](auto io, std::int64_t i) HWY_ATTR {
      Real w = io.load(weight + i);
      update(io.load(gradient + i), w, io, i);
      io.store(w, weight + i);
    });
    return;
  }
  const auto body = [&](auto io, std::int64_t i) HWY_ATTR {
    Real w = io.load(master + i);
    update(io.load(gradient + i), w, io, i);
    io.store(w, master + i);
    io.leave(w, weight + i);
  };
  if (chunk.streamed) {
    for_streamed_vectors<Real>(chunk.count, weight, body);
  } else {
    for_vectors<Real>(chunk.count, body);
  }
}

void AdamChunk(const UpdateChunk& chunk, const AdamOptions& options) {
  const math::Adam<Real> adam(options);
  float* m = chunk.moment1;
  float* v = chunk.moment2;
  dispatch_chunk(chunk, [&](auto g, auto w) {
    update_weights<decltype(g), decltype(w)>(
        chunk, [&](Real gradient, Real& weight, auto io, std::int64_t i) HWY_ATTR {
          Real first = io.load(m + i), second = io.load(v + i);
          adam.update(gradient, first, second, weight);
          io.store(first, m + i);
          io.store(second, v + i);
        });
  });
}

void SgdChunk(const UpdateChunk& chunk, const SgdOptions& options) {
  const math::Sgd<Real> sgd(options);
  float* buffer = chunk.moment1;
  dispatch_chunk(chunk, [&](auto g, auto w) {
    if (options.momentum == 0.0) {
      update_weights<decltype(g), decltype(w)>(chunk,
                                               [&](Real gradient, Real& weight, auto, std::int64_t)
                                                   HWY_ATTR { sgd.update(gradient, weight); });
    } else {
      update_weights<decltype(g), decltype(w)>(
          chunk, [&](Real gradient, Real& weight, auto io, std::int64_t i) HWY_ATTR {
            Real momentum = io.load(buffer + i);
            sgd.update(gradient, momentum, weight);
            io.store(momentum, buffer + i);
          });
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(SquareSumOf);
HWY_EXPORT(AdamChunk);
HWY_EXPORT(SgdChunk);

namespace {

const char* bytes_at(const TensorView& view, std::int64_t element) {
  return view.as<char>() + element * static_cast<std::int64_t>(core::size_of(view.dtype));
}

/// Sums the finite elements' squares and counts the others.
double finite_square_sum(const TensorView& x, const cpu::Chunk& chunk, std::int64_t& nonfinite,
                         bool& nan) {
  double total = 0.0;
  core::dispatch_floating(x.dtype, "check_gradients", [&](auto zero) {
    const auto* p = x.as<decltype(zero)>() + chunk.begin;
    for (std::int64_t i = 0; i < chunk.count; ++i) {
      const double v = static_cast<float>(p[i]);
      if (std::isfinite(v)) {
        total += v * v;
      } else {
        ++nonfinite;
        nan = nan || std::isnan(v);
      }
    }
  });
  return total;
}

struct ChunkCheck {
  double squared_norm = 0.0;
  std::int64_t nonfinite = 0;
  bool nan = false;
};

ChunkCheck check_chunk(const TensorView& x, const cpu::Chunk& chunk) {
  ChunkCheck check;
  check.squared_norm =
      HWY_DYNAMIC_DISPATCH(SquareSumOf)(x.dtype, bytes_at(x, chunk.begin), chunk.count);
  if (!std::isfinite(check.squared_norm)) {
    check.squared_norm = finite_square_sum(x, chunk, check.nonfinite, check.nan);
  }
  return check;
}

template <class Update>
void for_each_chunk(const std::vector<UpdateEntry>& entries, const Update& update) {
  const std::vector<cpu::Chunk> chunks =
      cpu::cut(entries.size(), [&](std::size_t i) { return entries[i].weight.numel(); });
  std::int64_t bytes = 0;
  for (const UpdateEntry& e : entries) bytes += static_cast<std::int64_t>(e.weight.nbytes());
  const bool streamed = bytes >= cpu::kStreamedBytes;
  const auto floats = [](const TensorView& view, std::int64_t at) {
    return view.defined() ? view.as<float>() + at : nullptr;
  };
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t k = begin; k < end; ++k) {
          const cpu::Chunk& chunk = chunks[static_cast<std::size_t>(k)];
          const UpdateEntry& e = entries[chunk.tensor];
          update(UpdateChunk{e.gradient.dtype, e.weight.dtype, bytes_at(e.gradient, chunk.begin),
                             const_cast<char*>(bytes_at(e.weight, chunk.begin)),
                             floats(e.master, chunk.begin), floats(e.moment1, chunk.begin),
                             floats(e.moment2, chunk.begin), chunk.count, streamed});
        }
      });
}

}  // namespace

GradientCheck CpuBackend::check_gradients(const std::vector<TensorView>& gradients,
                                          bool per_tensor_norms) const {
  const std::vector<cpu::Chunk> chunks =
      cpu::cut(gradients.size(), [&](std::size_t i) { return gradients[i].numel(); });
  std::vector<ChunkCheck> checks(chunks.size());
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          checks[k] = check_chunk(gradients[chunks[k].tensor], chunks[k]);
        }
      });
  GradientCheck result;
  if (per_tensor_norms) result.squared_norms.resize(gradients.size());
  for (std::size_t k = 0; k < chunks.size(); ++k) {
    const auto tensor = static_cast<std::int64_t>(chunks[k].tensor);
    result.squared_norm += checks[k].squared_norm;
    if (per_tensor_norms) result.squared_norms[chunks[k].tensor] += checks[k].squared_norm;
    if (checks[k].nonfinite == 0) continue;
    if (result.first_nonfinite < 0) result.first_nonfinite = tensor;
    if (result.first_nonfinite != tensor) continue;
    result.nonfinite_count += checks[k].nonfinite;
    result.is_nan = result.is_nan || checks[k].nan;
  }
  return result;
}

void CpuBackend::adam_update(const std::vector<UpdateEntry>& entries,
                             const AdamOptions& options) const {
  for_each_chunk(entries, [&](const UpdateChunk& chunk) {
    HWY_DYNAMIC_DISPATCH(AdamChunk)(chunk, options);
  });
}

void CpuBackend::sgd_update(const std::vector<UpdateEntry>& entries,
                            const SgdOptions& options) const {
  for_each_chunk(entries, [&](const UpdateChunk& chunk) {
    HWY_DYNAMIC_DISPATCH(SgdChunk)(chunk, options);
  });
}

}  // namespace cairn::kernels
#endif
