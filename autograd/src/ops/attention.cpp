// Attention. q, k, v and the result are read and written where they lie, by strides: heads are
// never copied apart.
#include <cmath>

#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/attention.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;

namespace {

// q [B, H, T, D], k and v [B, G, S, D], any strides; key_lengths [B], or undefined.
struct Heads {
  TensorView q, k, v, key_lengths = {};
};

struct AttentionSettings {
  bool causal = false;
  double dropout = 0.0;
  core::RandomDraw random = {};

  static AttentionSettings draw(bool causal, double dropout) {
    CAIRN_CHECK(dropout >= 0.0 && dropout < 1.0, "attention", "expected a dropout in 0..1, got ",
                dropout);
    if (dropout == 0.0) return {causal};
    return {causal, dropout, Generator::current().draw()};
  }

  // Writes y, and returns what the backward needs of the softmax.
  Tensor forward(const Heads& x, const TensorView& y) const {
    const Shape rows{x.q.size(0), x.q.size(1), x.q.size(2)};
    Tensor lse = Tensor::empty(rows, wide(x.q.dtype), x.q.device);
    kernels::attention(x.q, x.k, x.v, y, lse, options(x));
    return lse;
  }
  void backward(const Heads& x, const TensorView& y, const Tensor& lse, const TensorView& dy,
                const Heads& dx) const {
    kernels::attention_backward(x.q, x.k, x.v, y, lse, dy, dx.q, dx.k, dx.v, options(x));
  }

 private:
  kernels::AttentionOptions options(const Heads& x) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(x.q.size(3)));
    return {causal, scale, dropout, random, x.key_lengths};
  }
};

struct Attention {
  static constexpr OpInfo kInfo{"attention", CastPolicy::half};
  AttentionSettings job;

  Tensor forward(Context& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& key_lengths) {
    check(q, k, v);
    Tensor y = Tensor::empty_like(q);
    const Tensor lse = job.forward({q, k, v, view_or_none(key_lengths)}, y);
    for (const Tensor& saved : {q, k, v, y, lse, key_lengths}) ctx.save(saved);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors d;
    for (int i = 0; i < 3; ++i) d.push_back(ctx.new_gradient(i));
    const Tensor q = ctx.saved(0), k = ctx.saved(1), v = ctx.saved(2), key_lengths = ctx.saved(5);
    job.backward({q, k, v, view_or_none(key_lengths)}, ctx.saved(3), ctx.saved(4), dy,
                 {d[0], d[1], d[2]});
    d.push_back(Tensor());
    return d;
  }

 private:
  static void check(const Tensor& q, const Tensor& k, const Tensor& v) {
    CAIRN_CHECK(k.defined() && v.defined() && q.dims() == 4 && k.dims() == 4 &&
                    k.shape() == v.shape() && q.size(0) == k.size(0) && q.size(3) == k.size(3),
                kInfo.name, "expected q [B, H, T, D] and k, v [B, G, S, D], got ", q.shape(), ", ",
                k.shape(), " and ", v.shape());
  }
};

// The parts q, k and v of qkv [B, T, (H + 2 G) D] as heads [B, H or G, T, D].
Heads heads_of(const Tensor& qkv, std::int64_t H, std::int64_t G, const Tensor& key_lengths = {}) {
  const std::int64_t D = qkv.size(2) / (H + 2 * G);
  const TensorView all =
      qkv.view().reshape({qkv.size(0), qkv.size(1), H + 2 * G, D}).permute({0, 2, 1, 3});
  return {all.slice(1, 0, H), all.slice(1, H, H + G), all.slice(1, H + G, H + 2 * G),
          view_or_none(key_lengths)};
}

// [B, T, C] as [B, H, T, D].
TensorView as_heads(const Tensor& x, std::int64_t H) {
  return x.view().reshape({x.size(0), x.size(1), H, x.size(2) / H}).permute({0, 2, 1, 3});
}

struct SelfAttention {
  static constexpr OpInfo kInfo{"self_attention", CastPolicy::half};
  std::int64_t heads, kv_heads;
  AttentionSettings job;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& key_lengths) {
    check(x);
    const Tensor qkv = contiguous_data(x);
    const std::int64_t C = x.size(2) / (heads + 2 * kv_heads) * heads;
    Tensor y = empty_as(x, {x.size(0), x.size(1), C}, x.dtype());
    const Tensor lse = job.forward(heads_of(qkv, heads, kv_heads, key_lengths), as_heads(y, heads));
    for (const Tensor& saved : {qkv, y, lse, key_lengths}) ctx.save(saved);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor qkv = ctx.saved(0), key_lengths = ctx.saved(3), dqkv = Tensor::empty_like(qkv);
    job.backward(heads_of(qkv, heads, kv_heads, key_lengths), as_heads(ctx.saved(1), heads),
                 ctx.saved(2), as_heads(contiguous_data(dy), heads),
                 heads_of(dqkv, heads, kv_heads));
    return {dqkv, Tensor()};
  }

 private:
  void check(const Tensor& x) const {
    CAIRN_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, kInfo.name,
                "expected heads that are a multiple of kv_heads, got ", heads, " and ", kv_heads);
    CAIRN_CHECK(x.dims() == 3 && x.size(2) % (heads + 2 * kv_heads) == 0, kInfo.name,
                "expected qkv [B, T, (heads + 2 kv_heads) D] with ", heads, " heads and ", kv_heads,
                " of keys and of values, got ", x.shape());
  }
};

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                    double dropout, const Tensor& key_lengths) {
  return apply(Attention{AttentionSettings::draw(causal, dropout)}, q, k, v, key_lengths);
}

Tensor self_attention(const Tensor& qkv, std::int64_t heads, bool causal, double dropout,
                      const Tensor& key_lengths, std::int64_t kv_heads) {
  const AttentionSettings settings = AttentionSettings::draw(causal, dropout);
  return apply(SelfAttention{heads, kv_heads == 0 ? heads : kv_heads, settings}, qkv, key_lengths);
}

}  // namespace cairn::autograd
