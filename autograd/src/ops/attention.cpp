// Attention as products and a softmax. q, k, v and the result are read and written where they lie,
// by strides: heads are never copied apart.
#include <cmath>
#include <numeric>

#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/matmul.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;

namespace {

struct Dropout {
  double p = 0.0;
  std::uint64_t seed = 0, offset = 0;

  static Dropout draw(double p) {
    CAIRN_CHECK(p >= 0.0 && p < 1.0, "attention", "expected a dropout in 0..1, got ", p);
    if (p == 0.0) return {};
    Generator& generator = Generator::current();
    const std::uint64_t seed = generator.seed();
    return {p, seed, generator.next()};
  }
  void run(const TensorView& x, const TensorView& y) const {
    kernels::dropout(x, p, seed, offset, y);
  }
};

// q [B, H, T, D], k and v [B, H, S, D], any strides.
struct Heads {
  TensorView q, k, v;

  Shape scores() const { return {q.size(0), q.size(1), q.size(2), k.size(2)}; }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(q.size(3))); }
};

TensorView transposed(const TensorView& x) {
  return x.transpose(-2, -1);
}

// Returns the weights [B, H, T, S] and writes y = dropout(weights) v.
Tensor attend(const Heads& x, bool causal, const Dropout& dropout, const TensorView& y) {
  const Tensor weights = Tensor::empty(x.scores(), x.q.dtype, x.q.device);
  kernels::matmul(x.q, transposed(x.k), weights, {.alpha = x.scale()});
  kernels::softmax(weights, weights, {.causal = causal});
  if (dropout.p == 0.0) {
    kernels::matmul(weights, x.v, y);
    return weights;
  }
  const Tensor kept = Tensor::empty_like(weights);
  dropout.run(weights, kept);
  kernels::matmul(kept, x.v, y);
  return weights;
}

void attend_backward(const Heads& x, bool causal, const Dropout& dropout, const Tensor& weights,
                     const TensorView& dy, const Heads& dx) {
  const Tensor scratch = Tensor::empty_like(weights);
  const bool drops = dropout.p > 0.0;
  if (drops) dropout.run(weights, scratch);
  kernels::matmul(transposed(drops ? scratch : weights), dy, dx.v);
  kernels::matmul(dy, transposed(x.v), scratch);
  if (drops) dropout.run(scratch, scratch);
  kernels::softmax_backward(weights, scratch, scratch, {.causal = causal});
  kernels::matmul(scratch, x.k, dx.q, {.alpha = x.scale()});
  kernels::matmul(transposed(scratch), x.q, dx.k, {.alpha = x.scale()});
}

struct Attention {
  static constexpr OpInfo kInfo{"attention", CastPolicy::half};
  bool causal;
  Dropout dropout;

  Tensor forward(Context& ctx, const Tensor& q, const Tensor& k, const Tensor& v) {
    check(q, k, v);
    Tensor y = empty_as(q, q.shape(), q.dtype());
    const Tensor weights = attend({q, k, v}, causal, dropout, y);
    for (const Tensor& saved : {q, k, v, weights}) ctx.save(saved);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors d;
    for (int i = 0; i < 3; ++i) d.push_back(ctx.new_gradient(i));
    const Tensor q = ctx.saved(0), k = ctx.saved(1), v = ctx.saved(2);
    attend_backward({q, k, v}, causal, dropout, ctx.saved(3), dy, {d[0], d[1], d[2]});
    return d;
  }

 private:
  static void check(const Tensor& q, const Tensor& k, const Tensor& v) {
    CAIRN_CHECK(k.defined() && v.defined() && q.dims() == 4 && k.dims() == 4 &&
                    k.shape() == v.shape() && q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
                    q.size(3) == k.size(3),
                kInfo.name, "expected q [B, H, T, D] and k, v [B, H, S, D], got ", q.shape(), ", ",
                k.shape(), " and ", v.shape());
  }
};

// The three thirds of qkv [B, T, 3 C] as heads [B, H, T, D].
Heads heads_of(const Tensor& qkv, std::int64_t H) {
  const std::int64_t D = qkv.size(2) / 3 / H;
  const TensorView all =
      qkv.view().reshape({qkv.size(0), qkv.size(1), 3, H, D}).permute({2, 0, 3, 1, 4});
  return {all.select(0, 0), all.select(0, 1), all.select(0, 2)};
}

// [B, T, C] as [B, H, T, D].
TensorView as_heads(const Tensor& x, std::int64_t H) {
  return x.view().reshape({x.size(0), x.size(1), H, x.size(2) / H}).permute({0, 2, 1, 3});
}

struct SelfAttention {
  static constexpr OpInfo kInfo{"self_attention", CastPolicy::half};
  std::int64_t heads;
  bool causal;
  Dropout dropout;

  Tensor forward(Context& ctx, const Tensor& x) {
    CAIRN_CHECK(x.dims() == 3 && heads > 0 && x.size(2) % (3 * heads) == 0, kInfo.name,
                "expected qkv [B, T, 3 C] with C a multiple of ", heads, " heads, got ", x.shape());
    const Tensor qkv = contiguous_data(x);
    Tensor y = empty_as(x, {x.size(0), x.size(1), x.size(2) / 3}, x.dtype());
    const Tensor weights = attend(heads_of(qkv, heads), causal, dropout, as_heads(y, heads));
    ctx.save(qkv);
    ctx.save(weights);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor qkv = ctx.saved(0), dqkv = Tensor::empty_like(qkv);
    attend_backward(heads_of(qkv, heads), causal, dropout, ctx.saved(1),
                    as_heads(contiguous_data(dy), heads), heads_of(dqkv, heads));
    return {dqkv};
  }
};

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                    double dropout) {
  return apply(Attention{causal, Dropout::draw(dropout)}, q, k, v);
}

Tensor self_attention(const Tensor& qkv, std::int64_t heads, bool causal, double dropout) {
  return apply(SelfAttention{heads, causal, Dropout::draw(dropout)}, qkv);
}

}  // namespace cairn::autograd
