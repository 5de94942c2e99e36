
#include "cairn/kernels/conv.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/layer_norm.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/matmul.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

Work matmul(const char* name, DType dtype) {
  return {name, [dtype] {
            constexpr std::int64_t n = 2048;
            const Tensor a = random({n, n}, dtype), b = random({n, n}, dtype),
                         y = Tensor::empty({n, n}, dtype);
            return [=] { kernels::matmul(a, b, y); };
          }};
}

Work conv(const char* name, DType dtype) {
  return {
      name, [dtype] {
        const kernels::Conv2dOptions options{.padding = {1, 1}};
        const Tensor x = random_channels_last({16, 64, 56, 56}, dtype), y = Tensor::empty_like(x),
                     dx = Tensor::empty_like(x);
        const Tensor weight = random({64, 64, 3, 3}, dtype), dweight = Tensor::empty_like(weight);
        return [=] {
          kernels::conv2d(x, weight, {}, y, options);
          kernels::conv2d_backward_data(y, weight, {}, dx, options);
          kernels::conv2d_backward_weight(x, y, dweight, {}, options, false);
        };
      }};
}

std::function<void()> layer_norm() {
  constexpr std::int64_t n = 2048, d = 768;
  const Tensor x = random({n, d}), dy = random({n, d}), y = Tensor::empty({n, d}),
               dx = Tensor::empty({n, d});
  const Tensor weight = random({d}), bias = random({d}), dweight = Tensor::empty({d}),
               dbias = Tensor::empty({d});
  const Tensor mean = Tensor::empty({n}), rstd = Tensor::empty({n});
  return [=] {
    kernels::layer_norm(x, weight, bias, 1e-5, y, mean, rstd);
    kernels::layer_norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, false);
  };
}

std::function<void()> gelu() {
  const Tensor x = random({2048, 3072}), y = Tensor::empty_like(x), dx = Tensor::empty_like(x);
  return [=] {
    kernels::unary(kernels::UnaryOp::gelu, x, y);
    kernels::unary_backward(kernels::UnaryOp::gelu, x, y, dx);
  };
}

std::function<void()> cross_entropy() {
  constexpr std::int64_t n = 2048, v = 50257;
  const Tensor logits = random({n, v}), dlogits = Tensor::empty({n, v}), loss = Tensor::empty({n}),
               lse = Tensor::empty({n});
  const Tensor target = integers({n}, v), dloss = Tensor::full({n}, 1.0 / n);
  return [=] {
    kernels::cross_entropy(logits, target, loss, lse, {});
    kernels::cross_entropy_backward(logits, target, lse, dloss, dlogits, {});
  };
}

}  // namespace

std::vector<Work> kernel_works() {
  return {matmul("matmul_2048_f32", DType::f32),      matmul("matmul_2048_bf16", DType::bf16),
          matmul("matmul_2048_f16", DType::f16),      conv("conv3x3_64_16x56x56_f32", DType::f32),
          {"layer_norm_2048x768", layer_norm},        {"gelu_2048x3072", gelu},
          {"cross_entropy_2048x50257", cross_entropy}};
}

}  // namespace bench
