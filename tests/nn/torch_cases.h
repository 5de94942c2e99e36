// Operations and modules against PyTorch's values and gradients in a file of tests/golden.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "support/golden.h"

namespace cairn::nn {

using OfTwo = std::function<Tensor(const Tensor& a, const Tensor& b)>;

/// The cases of make_losses.py and make_layers.py: NAME.a, NAME.b where there are two inputs;
/// NAME.y, and NAME.da and NAME.db of sum(y * NAME.weight).
class TorchCases {
 public:
  explicit TorchCases(const std::string& file) : values_(file) {}

  const test::Golden& values() const { return values_; }

  void expect(const Tensor& got, const std::string& name, double tolerance = 3e-6) const {
    ASSERT_TRUE(got.defined()) << name;
    ASSERT_EQ(got.shape(), values_.shape(name)) << name;
    const std::vector<double>& expected = values_.values(name);
    const std::vector<double> values = got.to_vector();
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], expected[i], tolerance * (1 + std::abs(expected[i])))
          << name << " " << i;
    }
  }

  void compare(const std::string& name, const OfTwo& f, double tolerance = 3e-6) const {
    const Tensor a = values_.tensor(name + ".a").set_requires_grad(true);
    const bool two = values_.contains(name + ".b");
    const Tensor b = two ? values_.tensor(name + ".b").set_requires_grad(true) : Tensor();
    const Tensor y = f(a, b);
    expect(y, name + ".y", tolerance);
    autograd::backward(autograd::sum(y * values_.tensor(name + ".weight")));
    expect(a.grad(), name + ".da", tolerance);
    if (two) expect(b.grad(), name + ".db", tolerance);
  }

  /// With the parameters NAME.parameter.P, whose gradients are NAME.gradient.P. Then the same of a
  /// clone.
  template <class M>
  void compare_module(const std::string& name, M& module,
                      Tensor (*call)(M& module, const Tensor& a, const Tensor& b),
                      double tolerance = 1e-5) const {
    for (const NamedTensor& entry : module.parameters()) {
      const Tensor value = values_.tensor(name + ".parameter." + entry.name);
      ASSERT_EQ(value.shape(), entry.tensor.shape()) << entry.name;
      kernels::copy(value, entry.tensor);
    }
    const std::shared_ptr<Module> copy = module.clone();
    for (M* each : {&module, dynamic_cast<M*>(copy.get())}) {
      ASSERT_NE(each, nullptr) << name;
      compare(
          name, [&](const Tensor& a, const Tensor& b) { return call(*each, a, b); }, tolerance);
      for (const NamedTensor& entry : each->parameters()) {
        expect(entry.tensor.grad(), name + ".gradient." + entry.name, tolerance);
      }
    }
  }

 private:
  test::Golden values_;
};

}  // namespace cairn::nn
