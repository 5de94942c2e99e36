// Against values that PyTorch made: tests/golden/make_kernels.py.
#include <gtest/gtest.h>

#include <cmath>

#include "cairn/kernels/attention.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/layer_norm.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/optimizer_update.h"
#include "support/golden.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using test::expect_close;

constexpr double kTolerance = 2e-6;

class GoldenKernels : public testing::TestWithParam<Device> {
 protected:
  Tensor given(const std::string& name) const {
    return golden_.tensor(name, DType::f32, GetParam());
  }
  Tensor empty(const Shape& shape) const { return Tensor::empty(shape, DType::f32, GetParam()); }
  void expect(const Tensor& actual, const std::string& name) const {
    expect_close(actual, golden_.values(name), kTolerance, kTolerance, name);
  }

  const test::Golden golden_{"kernels"};
};

TEST_P(GoldenKernels, Activations) {
  const Tensor x = given("activation.x"), y = Tensor::empty_like(x), dx = Tensor::empty_like(x);
  const Tensor ones = Tensor::full(x.shape(), 1.0, DType::f32, GetParam());
  const std::pair<std::string, UnaryOp> cases[] = {{"gelu", UnaryOp::gelu},
                                                   {"gelu_tanh", UnaryOp::gelu_tanh},
                                                   {"silu", UnaryOp::silu},
                                                   {"sigmoid", UnaryOp::sigmoid},
                                                   {"tanh", UnaryOp::tanh}};
  for (const auto& [name, op] : cases) {
    unary(op, x, y);
    expect(y, name + ".y");
    unary_backward(op, saves_output(op) ? y : x, ones, dx);
    expect(dx, name + ".dx");
  }
}

TEST_P(GoldenKernels, Norms) {
  const Tensor x = given("norm.x"), weight = given("norm.weight"), bias = given("norm.bias");
  const Tensor y = Tensor::empty_like(x), dx = Tensor::empty_like(x), mean = empty({5}),
               rstd = empty({5});
  const Tensor dweight = empty({33}), dbias = empty({33});
  layer_norm(x, weight, bias, 1e-5, y, mean, rstd);
  expect(y, "layer_norm.y");
  layer_norm_backward(x, weight, mean, rstd, given("layer_norm.dy"), dx, dweight, dbias, false);
  expect(dx, "layer_norm.dx");
  expect(dweight, "layer_norm.dweight");
  expect(dbias, "layer_norm.dbias");
  rms_norm(x, weight, 1e-6, y, rstd);
  expect(y, "rms_norm.y");
  rms_norm_backward(x, weight, rstd, given("rms_norm.dy"), dx, dweight, false);
  expect(dx, "rms_norm.dx");
  expect(dweight, "rms_norm.dweight");
}

TEST_P(GoldenKernels, CrossEntropy) {
  const Tensor logits = given("cross_entropy.logits"), dlogits = Tensor::empty_like(logits);
  const Tensor target = golden_.tensor("cross_entropy.target", DType::i64, GetParam());
  const Tensor loss = empty({6}), lse = empty({6});
  const Tensor mean =
      Tensor::full({1}, 1.0 / 5, DType::f32, GetParam());  // one of the six is ignored
  for (const auto& [name, smoothing] : {std::pair{"plain", 0.0}, std::pair{"smooth", 0.1}}) {
    const CrossEntropyOptions options{.label_smoothing = smoothing};
    cross_entropy(logits, target, loss, lse, options);
    expect(loss, std::string("cross_entropy.") + name + ".loss");
    cross_entropy_backward(logits, target, lse, mean.view().expand({6}), dlogits, options);
    expect(dlogits, std::string("cross_entropy.") + name + ".dlogits_of_mean");
  }
}

TEST_P(GoldenKernels, Attention) {
  for (const std::string name : {"attention.all", "attention.causal", "attention.causal_after"}) {
    const Tensor q = given(name + ".q"), k = given(name + ".k"), v = given(name + ".v");
    const Tensor y = Tensor::empty_like(q), lse = empty({q.size(0), q.size(1), q.size(2)});
    const Tensor dq = Tensor::empty_like(q), dk = Tensor::empty_like(k), dv = Tensor::empty_like(v);
    const AttentionOptions options{.causal = name != "attention.all",
                                   .scale = 1 / std::sqrt(static_cast<double>(q.size(3)))};
    attention(q, k, v, y, lse, options);
    expect(y, name + ".y");
    attention_backward(q, k, v, y, lse, given(name + ".dy"), dq, dk, dv, options);
    expect(dq, name + ".dq");
    expect(dk, name + ".dk");
    expect(dv, name + ".dv");
  }
}

TEST_P(GoldenKernels, PairLosses) {
  const Tensor x = given("pair.x"), target = given("pair.target"),
               probability = given("pair.probability");
  const Tensor loss = Tensor::empty_like(x), dx = Tensor::empty_like(x);
  const Tensor one = Tensor::full({1}, 1.0, DType::f32, GetParam());
  mse(x, target, loss);
  expect(loss, "mse.loss");
  mse_backward(x, target, one, dx);
  expect(dx, "mse.dx");
  bce_with_logits(x, probability, loss);
  expect(loss, "bce.loss");
  bce_with_logits_backward(x, probability, one, dx);
  expect(dx, "bce.dx");
}

TEST_P(GoldenKernels, FourStepsOfEachOptimizer) {
  const auto run = [&](const std::string& name, auto step) {
    const Tensor weight = given("update.weight");
    const Tensor m = Tensor::zeros(weight.shape(), DType::f32, GetParam()),
                 v = Tensor::zeros(weight.shape(), DType::f32, GetParam());
    for (int k = 0; k < 4; ++k) {
      const Tensor gradient = given("update.gradient." + std::to_string(k));
      step(std::vector<UpdateEntry>{{gradient, weight, {}, m, v}}, k);
    }
    expect(weight, name + ".weight");
  };
  const auto adam = [](AdamOptions options) {
    return [options](const std::vector<UpdateEntry>& entries, int k) mutable {
      options.correction1 = 1 - std::pow(options.beta1, k + 1);
      options.correction2 = 1 - std::pow(options.beta2, k + 1);
      update(entries, options);
    };
  };
  const auto sgd = [](SgdOptions options) {
    return [options](const std::vector<UpdateEntry>& entries, int k) mutable {
      options.first_step = k == 0;
      update(entries, options);
    };
  };
  run("adam", adam({.lr = 1e-2, .weight_decay = 0.02, .adamw = false}));
  run("adamw", adam({.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1}));
  run("sgd", sgd({.lr = 0.1, .weight_decay = 0.05}));
  run("momentum", sgd({.lr = 0.1, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.05}));
  run("nesterov", sgd({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true}));
}

INSTANTIATE_TEST_SUITE_P(Devices, GoldenKernels, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
