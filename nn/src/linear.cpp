#include "cairn/nn/linear.h"

#include "parameters.h"

namespace cairn::nn {

Linear::Linear(std::int64_t in, std::int64_t out, const LinearOptions& options)
    : options_(options) {
  CAIRN_CHECK(in >= 0 && out >= 0, "Linear", "expected sizes >= 0, got ", in, " and ", out);
  weight_ = add_parameter("weight", default_weight({out, in}));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, weight_.shape()));
  extra_ = core::str(in, " -> ", out, options.bias ? "" : ", no bias");
}

Linear::Linear(const Tensor& weight) : options_{.bias = false} {
  CAIRN_CHECK(weight.defined() && weight.dims() == 2, "Linear", "expected a weight [O, I], got ",
              weight.defined() ? core::str(weight.shape()) : "none");
  weight_ = add_parameter("weight", weight);
  extra_ = core::str(weight.size(1), " -> ", weight.size(0), ", no bias");
}

Tensor Linear::forward(const Tensor& x) {
  return autograd::linear(x, weight_, bias_, options_.activation);
}

std::shared_ptr<Module> Linear::make_like() const {
  return std::make_shared<Linear>(weight_.size(1), weight_.size(0), options_);
}

Bilinear::Bilinear(std::int64_t in_a, std::int64_t in_b, std::int64_t out, bool bias) {
  CAIRN_CHECK(in_a > 0 && in_b > 0 && out > 0, "Bilinear", "expected positive sizes, got ", in_a,
              ", ", in_b, " and ", out);
  const double bound = 1.0 / std::sqrt(static_cast<double>(in_a));
  weight_ = add_parameter("weight", Tensor::empty({out, in_a, in_b}));
  init::uniform(weight_, -bound, bound);
  if (bias) {
    bias_ = add_parameter("bias", Tensor::empty({out}));
    init::uniform(bias_, -bound, bound);
  }
  extra_ = core::str(in_a, ", ", in_b, " -> ", out, bias ? "" : ", no bias");
}

Tensor Bilinear::forward(const Tensor&) {
  core::fail("Bilinear", "expected run(a, b), got a call with one tensor");
}

std::shared_ptr<Module> Bilinear::make_like() const {
  return std::make_shared<Bilinear>(weight_.size(1), weight_.size(2), weight_.size(0),
                                    bias_.defined());
}

}  // namespace cairn::nn
