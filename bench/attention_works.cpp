// Fused attention on a GPU, causal, with heads where a projection leaves them.
#include "cairn/kernels/attention.h"

#include <cmath>

#include "works.h"

namespace bench {
namespace {

using namespace cairn;

struct Sizes {
  std::int64_t B, H, T, D;

  /// Of one product of queries and keys, the half that the mask leaves.
  double operations() const {
    return static_cast<double>(B * H) * static_cast<double>(T * T) * static_cast<double>(D);
  }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(D)); }
};

/// q, k and v in one [B, T, 3, H, D], and a result.
struct Heads {
  Tensor packed, y, lse;

  explicit Heads(const Sizes& s)
      : packed(random({s.B, s.T, 3, s.H, s.D}, DType::bf16)),
        y(random({s.B, s.T, s.H, s.D}, DType::bf16)),
        lse(Tensor::empty({s.B, s.H, s.T})) {}

  TensorView part(int i) const { return packed.view().permute({2, 0, 3, 1, 4}).select(0, i); }
  TensorView out() const { return y.view().permute({0, 2, 1, 3}); }
};

Run forward(const Sizes& s) {
  const Heads x(s);
  return [=] {
    kernels::attention(x.part(0), x.part(1), x.part(2), x.out(), x.lse,
                       {.causal = true, .scale = s.scale()});
  };
}

Run both(const Sizes& s) {
  const Heads x(s), d(s);  // dq, dk, dv and dy
  return [=] {
    const kernels::AttentionOptions options{.causal = true, .scale = s.scale()};
    kernels::attention(x.part(0), x.part(1), x.part(2), x.out(), x.lse, options);
    kernels::attention_backward(x.part(0), x.part(1), x.part(2), x.out(), x.lse, d.out(), d.part(0),
                                d.part(1), d.part(2), options);
  };
}

Work work(const char* name, const Sizes& s, double products, Run (*prepare)(const Sizes&)) {
  Work w{name, [=] { return prepare(s); }};
  w.operations = products * s.operations();
  return w;
}

}  // namespace

// Two products forward and five backward: what a kernel computes twice does not count.
std::vector<Work> attention_works(bool tiny) {
  const Sizes gpt2 = tiny ? Sizes{1, 2, 24, 16} : Sizes{16, 12, 1024, 64};
  const Sizes wide = tiny ? Sizes{1, 1, 40, 72} : Sizes{2, 16, 8192, 128};
  return {work("attention_gpt2_forward_bf16", gpt2, 2, forward),
          work("attention_gpt2_bf16", gpt2, 7, both),
          work("attention_8192x128_bf16", wide, 7, both)};
}

}  // namespace bench
