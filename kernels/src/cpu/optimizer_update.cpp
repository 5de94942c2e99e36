// adam_update and sgd_update: each one pass over its tensors, at the speed of memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/optimizer_update.cpp"
#include "cpu/targets.h"
// ---
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

HWY_EXPORT(AdamChunk);
HWY_EXPORT(SgdChunk);

namespace {

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
          update(UpdateChunk{e.gradient.dtype, e.weight.dtype,
                             cpu::bytes_at(e.gradient, chunk.begin),
                             const_cast<char*>(cpu::bytes_at(e.weight, chunk.begin)),
                             floats(e.master, chunk.begin), floats(e.moment1, chunk.begin),
                             floats(e.moment2, chunk.begin), chunk.count, streamed});
        }
      });
}

}  // namespace

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
