// Fully connected layers.
#pragma once

#include "cairn/autograd/ops.h"
#include "cairn/nn/module.h"

namespace cairn::nn {

struct LinearOptions {
  bool bias = true;
  autograd::Activation activation = autograd::Activation::none;  // in the product's epilogue
};

/// y = activation(x weight^T + bias). x [..., I], weight [O, I], bias [O].
/// Both start uniform in +-1 / sqrt(I).
class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, const LinearOptions& options = {});
  /// With a weight [O, I] that is another module's too (an embedding's: tied), and no bias.
  explicit Linear(const Tensor& weight);

  std::string kind() const override { return "Linear"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }  // undefined without one
  const LinearOptions& options() const { return options_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  LinearOptions options_;
  Tensor weight_, bias_;
};

/// y[..., o] = a^T weight[o] b + bias[o] of two inputs. a [..., I], b [..., J], weight [O, I, J],
/// bias [O]. Both start uniform in +-1 / sqrt(I).
class Bilinear : public Module {
 public:
  Bilinear(std::int64_t in_a, std::int64_t in_b, std::int64_t out, bool bias = true);

  std::string kind() const override { return "Bilinear"; }
  Tensor run(const Tensor& a, const Tensor& b) { return autograd::bilinear(a, b, weight_, bias_); }
  Tensor forward(const Tensor& x) override;  // throws: use run

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  Tensor weight_, bias_;
};

}  // namespace cairn::nn
