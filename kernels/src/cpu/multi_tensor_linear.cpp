// multi_tensor_scale and multi_tensor_axpby: one pass over memory. Each block is checked, then
// combined while it is in the first-level cache, so an argument may be overwritten.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/multi_tensor_linear.cpp"
#include "cpu/targets.h"
// ---
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/linear_block.h"
#include "cpu/simd.h"
#include "cpu/tensor_checks.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// Calls f with the pointer, typed.
template <class F>
HWY_INLINE void with_type(DType dtype, void* data, const F& f) {
  switch (dtype) {
    case DType::f16:
      return f(static_cast<Half*>(data));
    case DType::bf16:
      return f(static_cast<BFloat16*>(data));
    default:
      return f(static_cast<float*>(data));
  }
}

template <class X, class Out>
void scale_block(const X* x, Out* out, std::int64_t n, double a) {
  const Real factor(a);
  for_vectors<Real>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(factor * io.load(x + i), out + i); });
}

template <class X, class Y, class Out>
void add_block(const X* x, const Y* y, Out* out, std::int64_t n, double a, double b) {
  const Real of_x(a), of_y(b);
  for_vectors<Real>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(fma(of_x, io.load(x + i), of_y * io.load(y + i)), out + i);
  });
}

void Combine(const LinearBlock& block) {
  with_type(block.x_dtype, block.x, [&](const auto* x) {
    with_type(block.out_dtype, block.out, [&](auto* out) {
      if (block.y == nullptr) return scale_block(x, out, block.count, block.a);
      with_type(block.y_dtype, block.y,
                [&](const auto* y) { add_block(x, y, out, block.count, block.a, block.b); });
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(Combine);

namespace {

constexpr std::int64_t kBlock = 4096;  // elements

LinearBlock block_at(const LinearLists& lists, const cpu::Chunk& chunk) {
  const auto at = [&](const TensorView& view) {
    return const_cast<char*>(cpu::bytes_at(view, chunk.begin));
  };
  const TensorView &x = lists.x[chunk.tensor], &out = lists.out[chunk.tensor];
  const TensorView y = lists.y.empty() ? TensorView() : lists.y[chunk.tensor];
  return {x.dtype, y.dtype,     out.dtype, at(x),  y.defined() ? at(y) : nullptr,
          at(out), chunk.count, lists.a,   lists.b};
}

CheckPart combine_chunk(const LinearLists& lists, const cpu::Chunk& chunk) {
  const PowerSum power(2.0);
  const JoinParts join{power};
  CheckPart part{0.0, 0, 0};
  for (std::int64_t done = 0; done < chunk.count; done += kBlock) {
    const LinearBlock block =
        block_at(lists, {chunk.tensor, chunk.begin + done, std::min(kBlock, chunk.count - done)});
    if (lists.check_x) {
      part = join(part, cpu::check_run(block.x_dtype, block.x, block.count, power));
    }
    if (lists.check_y) {
      part = join(part, cpu::check_run(block.y_dtype, block.y, block.count, power));
    }
    HWY_DYNAMIC_DISPATCH(Combine)(block);
  }
  return part;
}

}  // namespace

void CpuBackend::multi_tensor_linear(const LinearLists& lists, TensorCheck* checks) const {
  const std::vector<cpu::Chunk> chunks =
      cpu::cut(lists.x.size(), [&](std::size_t i) { return lists.x[i].numel(); });
  std::vector<CheckPart> parts(chunks.size());
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          parts[k] = combine_chunk(lists, chunks[k]);
        }
      });
  cpu::join_chunks(chunks, parts, PowerSum(2.0), {checks, lists.x.size()});
}

}  // namespace cairn::kernels
#endif
