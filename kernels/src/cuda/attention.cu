#include "cuda/attention.cuh"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "attention_composed.h"
#include "cuda/cuda_backend.h"
#include "cuda/cudnn/attention.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

/// f64 is for checking.
bool is_fused(const TensorView& q) {
  return q.dtype != DType::f64 && q.size(3) <= 256;
}

/// Calls f(T{}, D) with the element type and, as a constant, the head size to which tiles are
/// padded.
template <class F>
void dispatch_tiles(const TensorView& q, const char* op, F f) {
  const auto sized = [&](auto type) {
    const std::int64_t columns = q.size(3);
    if (columns <= 32) return f(type, std::integral_constant<int, 32>());
    if (columns <= 64) return f(type, std::integral_constant<int, 64>());
    if (columns <= 128) return f(type, std::integral_constant<int, 128>());
    f(type, std::integral_constant<int, 256>());
  };
  core::dispatch_floating(q.dtype, op, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), double>) sized(type);
  });
}

/// Whether a block may have the shared memory that the tiles of both passes take: GPUs for
/// workstations have 99 KiB.
bool tiles_fit(const Queue& queue, const TensorView& q) {
  std::size_t bytes = 0;
  dispatch_tiles(q, queue.op(), [&](auto type, auto size) {
    using T = decltype(type);
    constexpr int D = decltype(size)::value;
    bytes = std::max(ForwardMemory<T, D>::kBytes, BackwardMemory<T, D>::kBytes);
  });
  return bytes <= queue.most_shared_bytes();
}

/// An operand [B, H, N, D], or one number a row [B, H, N], as the kernels want it: itself, or
/// workspace, with zeros beyond the rows' ends and, where that is asked for, in rows behind them.
class PackedHeads {
 public:
  PackedHeads(const CudaBackend& backend, const Queue& queue, const TensorView& x,
              std::int64_t zeros = 0)
      : backend_(backend), target_(x), view_(x) {
    if (zeros == 0 && is_packed(x)) return;
    core::Shape shape = x.shape;
    shape[2] += zeros;
    if (x.dims() == 4) shape[3] = ceil_div(x.size(3), 8) * 8;
    memory_ = queue.workspace(static_cast<std::size_t>(shape.numel()) * core::size_of(x.dtype));
    view_ = TensorView(memory_->data(), shape, core::contiguous_strides(shape), x.dtype, x.device);
  }

  /// An operand that is read.
  static PackedHeads of(const CudaBackend& backend, const Queue& queue, const TensorView& x,
                        std::int64_t zeros = 0) {
    PackedHeads heads(backend, queue, x, zeros);
    if (heads.memory_ == nullptr) return heads;
    const TensorView& all = heads.view_;
    if (all.size(-1) > x.size(-1)) {
      backend.fill(all, 0.0);
    } else if (zeros > 0) {
      backend.fill(all.slice(2, x.size(2), all.size(2)), 0.0);
    }
    backend.copy(x, heads.part());
    return heads;
  }
  /// Brings what was written to where it belongs.
  void finish() const {
    if (memory_ != nullptr) backend_.copy(part(), target_);
  }

  const TensorView& view() const { return view_; }
  std::int64_t columns() const { return view_.size(3); }
  template <class T>
  Heads<T> as() const {
    return Heads<T>(view_);
  }

 private:
  static bool is_packed(const TensorView& x) {
    if (x.dims() == 3) return true;
    const auto whole = [&](int d) { return x.size(d) == 1 || x.strides[d] % 8 == 0; };
    return x.size(3) % 8 == 0 && x.strides[3] == 1 && whole(0) && whole(1) && whole(2) &&
           reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  }
  TensorView part() const {
    const TensorView rows = view_.slice(2, 0, target_.size(2));
    return rows.dims() == 3 ? rows : rows.slice(3, 0, target_.size(3));
  }

  const CudaBackend& backend_;
  TensorView target_, view_;
  std::shared_ptr<core::Storage> memory_;
};

AttentionShape shape_of(const TensorView& q, const TensorView& k, const PackedHeads& heads,
                        const AttentionOptions& options) {
  AttentionShape shape{
      q.size(1),
      q.size(2),
      k.size(2),
      q.size(1) / k.size(1),
      static_cast<int>(heads.columns()),
      options.causal,
      options.key_lengths.defined() ? options.key_lengths.as<std::int64_t>() : nullptr,
      static_cast<float>(options.scale),
      {}};
  if (options.dropout > 0.0) {
    shape.dropout = {math::dropout_threshold(options.dropout),
                     static_cast<float>(1.0 / (1.0 - options.dropout)), options.draw};
  }
  return shape;
}

}  // namespace

void CudaBackend::attention(View q, View k, View v, View y, View lse,
                            const AttentionOptions& options) const {
  if (!is_fused(q)) return composed_attention(*this, q, k, v, y, lse, options);
  const Queue queue("attention", y.device);
  const bool fits = tiles_fit(queue, q);
  const std::optional<std::int64_t> asks = sdpa_rows_of_zeros(queue, q, k, options, false);
  if (!fits && !asks) return composed_attention(*this, q, k, v, y, lse, options);
  const std::int64_t zeros = asks.value_or(0);
  const auto in = [&](const TensorView& x) { return PackedHeads::of(*this, queue, x, zeros); };
  const PackedHeads queries = in(q), keys = in(k), values = in(v);
  const PackedHeads out(*this, queue, y, zeros), sums(*this, queue, lse, zeros);
  const SdpaOperands operands{.q = queries.view(),
                              .k = keys.view(),
                              .v = values.view(),
                              .y = out.view(),
                              .lse = sums.view()};
  if (asks && sdpa_forward(queue, operands, options)) {
    sums.finish();
    return out.finish();
  }
  if (!fits) return composed_attention(*this, q, k, v, y, lse, options);
  const AttentionShape shape = shape_of(q, k, queries, options);
  dispatch_tiles(q, "attention", [&](auto type, auto size) {
    using T = decltype(type);
    constexpr int D = decltype(size)::value;
    using Tile = ForwardTiling<T, D>;
    const Grid grid{shape.heads * q.size(0) * ceil_div(shape.queries, Tile::kRows), Tile::kThreads,
                    ForwardMemory<T, D>::kBytes};
    launch(queue, grid, attention_kernel<T, D>, shape, queries.as<T>(), keys.as<T>(),
           values.as<T>(), out.as<T>(), lse.as<float>());
  });
  out.finish();
}

void CudaBackend::attention_backward(View q, View k, View v, View y, View lse, View dy, View dq,
                                     View dk, View dv, const AttentionOptions& options) const {
  if (!is_fused(q)) return composed_attention_backward(*this, q, k, v, dy, dq, dk, dv, options);
  const Queue queue("attention_backward", q.device);
  const bool fits = tiles_fit(queue, q);
  const std::optional<std::int64_t> asks = sdpa_rows_of_zeros(queue, q, k, options, true);
  if (!fits && !asks) return composed_attention_backward(*this, q, k, v, dy, dq, dk, dv, options);
  const std::int64_t zeros = asks.value_or(0);
  const auto in = [&](const TensorView& x) { return PackedHeads::of(*this, queue, x, zeros); };
  const PackedHeads queries = in(q), keys = in(k), values = in(v), outs = in(y), gradients = in(dy),
                    sums = in(lse);
  const PackedHeads dqueries(*this, queue, dq, zeros), dkeys(*this, queue, dk, zeros),
      dvalues(*this, queue, dv, zeros);
  const auto finish = [&] {
    for (const PackedHeads* gradient : {&dqueries, &dkeys, &dvalues}) gradient->finish();
  };
  const SdpaOperands operands{queries.view(),  keys.view(),  values.view(),
                              outs.view(),     sums.view(),  gradients.view(),
                              dqueries.view(), dkeys.view(), dvalues.view()};
  if (asks && sdpa_backward(queue, operands, options)) return finish();
  if (!fits) return composed_attention_backward(*this, q, k, v, dy, dq, dk, dv, options);
  const AttentionShape shape = shape_of(q, k, queries, options);
  const std::int64_t heads = q.size(0) * q.size(1), rows = heads * padded_rows(q.size(2));
  const std::int64_t key_heads = q.size(0) * k.size(1);
  const Buffer<RowTerms> terms(queue, rows);
  dispatch_tiles(q, "attention_backward", [&](auto type, auto size) {
    using T = decltype(type);
    constexpr int D = decltype(size)::value;
    using Tile = BackwardTiling<T, D>;
    const auto q_heads = queries.as<T>(), k_heads = keys.as<T>(), v_heads = values.as<T>(),
               dy_heads = gradients.as<T>();
    const auto grid = [&](std::int64_t count, std::int64_t length) {
      return Grid{count * ceil_div(length, Tile::kRows), Tile::kThreads,
                  BackwardMemory<T, D>::kBytes};
    };
    launch(queue, grid_for(rows * (D / 8)), attention_rows_kernel<T, D>, shape, rows, outs.as<T>(),
           dy_heads, lse.as<float>(), terms.data());
    launch(queue, grid(heads, shape.queries), attention_queries_kernel<T, D>, shape, q_heads,
           k_heads, v_heads, dy_heads, terms.data(), dqueries.as<T>());
    const auto sum_keys = [&](auto kernel) {
      launch(queue, grid(key_heads, shape.keys), kernel, shape, q_heads, k_heads, v_heads, dy_heads,
             terms.data(), dkeys.as<T>(), dvalues.as<T>());
    };
    if constexpr (D <= 128) {
      sum_keys(attention_keys_kernel<T, D, KeyGradients::both>);
    } else {  // the sums of both do not fit into registers
      sum_keys(attention_keys_kernel<T, D, KeyGradients::values>);
      sum_keys(attention_keys_kernel<T, D, KeyGradients::keys>);
    }
  });
  finish();
}

}  // namespace cairn::kernels
