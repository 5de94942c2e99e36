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

Tensor Linear::forward(const Tensor& x) {
  return autograd::linear(x, weight_, bias_, options_.activation);
}

std::shared_ptr<Module> Linear::make_like() const {
  return std::make_shared<Linear>(weight_.size(1), weight_.size(0), options_);
}

}  // namespace cairn::nn
