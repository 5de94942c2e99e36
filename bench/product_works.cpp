// Products on a GPU beside the best that cuBLASLt has for them.
#include "best_product.h"
#include "cairn/kernels/matmul.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

struct Product {
  const char* name;
  std::int64_t m, k, n;
  DType dtype = DType::bf16;
  bool transposed_a = false, transposed_b = false;

  /// [rows, columns], stored so or the other way round.
  static TensorView view(const Tensor& x, bool transposed) {
    return transposed ? x.view().transpose(0, 1) : x.view();
  }
  Tensor a() const { return random(transposed_a ? Shape{k, m} : Shape{m, k}, dtype); }
  Tensor b() const { return random(transposed_b ? Shape{n, k} : Shape{k, n}, dtype); }

  Run ours() const {
    const Tensor x = a(), w = b(), y = Tensor::empty({m, n}, dtype);
    const bool ta = transposed_a, tb = transposed_b;
    return [=] { kernels::matmul(view(x, ta), view(w, tb), y); };
  }
  Run best() const {
    const Tensor x = a(), w = b(), y = Tensor::empty({m, n}, dtype);
    const Run run = best_product(view(x, transposed_a), view(w, transposed_b), y);
    return [=] { run(), static_cast<void>(x), static_cast<void>(w); };
  }
};

Work work_of(const Product& p) {
  Work work{p.name, [p] { return p.ours(); }, [p] { return p.best(); }};
  work.operations = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.k * p.n);
  return work;
}

}  // namespace

std::vector<Work> product_works(bool tiny) {
  const std::int64_t n = tiny ? 16 : 8192, half = n / 2;         // square
  const std::int64_t t = tiny ? 16 : 16384, d = tiny ? 8 : 768;  // GPT-2's tokens and width
  const std::int64_t v = tiny ? 40 : 50257;
  std::vector<Work> works;
  for (const Product& p : {
           Product{"matmul_8192_bf16", n, n, n},
           Product{"matmul_8192_f16", n, n, n, DType::f16},
           Product{"matmul_4096_f32", half, half, half, DType::f32},
           Product{"gpt2_qkv_bf16", t, d, 3 * d, DType::bf16, false, true},
           Product{"gpt2_up_bf16", t, d, 4 * d, DType::bf16, false, true},
           Product{"gpt2_up_gradient_bf16", 4 * d, t, d, DType::bf16, true, false},
           Product{"gpt2_head_bf16", t, d, v, DType::bf16, false, true},
           Product{"gpt2_head_gradient_bf16", v, t, d, DType::bf16, true, false},
       })
    works.push_back(work_of(p));
  return works;
}

}  // namespace bench
