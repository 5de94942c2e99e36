// Tensors on more than one device, and half activations beside f32 parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/autograd/autograd.h"
#include "cairn/kernels/elementwise.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;

constexpr Device kSecond{DeviceType::cpu, 1};

TEST(Devices, ACopyIsDifferentiable) {
  const Tensor x = leaf({2, 3}, 1), w = random_tensor({2, 3}, 2);
  const Tensor there = to(x, kSecond);
  EXPECT_EQ(there.device(), kSecond);
  const Tensor y = to(there * to(w, kSecond), x.device()) + x;
  backward(sum(y));
  EXPECT_EQ(x.grad().device(), x.device());
  std::vector<double> expected = w.to_vector();
  for (double& v : expected) v += 1;
  expect_close(x.grad(), expected, 1e-14);
}

TEST(Devices, TheWholePassMayRunOnTheSecond) {
  const Tensor x = to(random_tensor({4, 3}, 1), kSecond);
  Tensor w = to(random_tensor({2, 3}, 2), kSecond);
  w.set_requires_grad(true);
  const Tensor target = to(Tensor::zeros({4}, DType::i64), kSecond);
  backward(cross_entropy(linear(x, w), target));
  EXPECT_EQ(w.grad().device(), kSecond);
  EXPECT_EQ(argmax(x).device(), kSecond);
}

TEST(Devices, OperandsOnTwoAreNamed) {
  const Tensor x = random_tensor({2}, 1), y = to(x, kSecond);
  EXPECT_THAT(error_of([&] { x + y; }),
              ::testing::AllOf(HasSubstr("add"), HasSubstr(core::to_string(x.device())),
                               HasSubstr("cpu:1")));
  EXPECT_THAT(error_of([&] { to(x, Device{DeviceType::cpu, 7}); }), HasSubstr("cpu:7"));
}

// O2 keeps batch norms in f32 under half activations; f32 gradients come from half ones.
TEST(MixedDtypes, NormsTakeHalfActivationsBesideF32Parameters) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor x = leaf({6, 4}, 1, -1, 1, dtype);
    Tensor w = leaf({4}, 2, 0.5, 1, DType::f32), b = leaf({4}, 3, -1, 1, DType::f32);
    const Tensor dy = random_tensor({6, 4}, 4, -1, 1, dtype);
    const auto run = [&](const std::function<Tensor(const Tensor&)>& f) {
      const Tensor y = f(x);
      EXPECT_EQ(y.dtype(), dtype);
      backward(y, dy);
      const std::vector<double> got = w.grad().to_vector();
      EXPECT_EQ(w.grad().dtype(), DType::f32);
      w.clear_grad(), b.clear_grad();
      backward(f(to(x.detach(), DType::f32)), to(dy, DType::f32));
      expect_close(w.grad(), got, 1e-5);
      w.clear_grad(), b.clear_grad();
    };
    run([&](const Tensor& in) { return layer_norm(in, w, b); });
    run([&](const Tensor& in) { return rms_norm(in, w); });
    run([&](const Tensor& in) { return batch_norm(in, w, b, {}, {}); });
  }
}

}  // namespace
}  // namespace cairn::autograd
