#include "cairn/nn/norm.h"

#include "cairn/autograd/ops.h"
#include "parameters.h"

namespace cairn::nn {

namespace {
void check_last(const char* kind, const Tensor& x, std::int64_t size) {
  CAIRN_CHECK(x.dims() >= 1 && x.size(-1) == size, kind, "expected x [..., ", size, "], got ",
              x.shape());
}
}  // namespace

BatchNorm::BatchNorm(std::int64_t channels, int dims, const BatchNormOptions& options)
    : options_(options), dims_(dims) {
  CAIRN_CHECK(channels > 0, "BatchNorm", "expected at least one channel, got ", channels);
  if (options.affine) {
    weight_ = add_parameter("weight", constant_parameter(channels, 1.0));
    bias_ = add_parameter("bias", constant_parameter(channels, 0.0));
  }
  running_mean_ = add_buffer("running_mean", constant_parameter(channels, 0.0));
  running_var_ = add_buffer("running_var", constant_parameter(channels, 1.0));
  extra_ = core::str(channels, options.relu ? ", relu" : "");
}

Tensor BatchNorm::forward(const Tensor& x) {
  CAIRN_CHECK(x.dims() == dims_ && x.size(1) == channels(), kind(), "expected x [N, ", channels(),
              dims_ == 2 ? "]" : ", H, W]", ", got ", x.shape());
  return autograd::batch_norm(x, weight_, bias_, running_mean_, running_var_,
                              {.training = training(),
                               .eps = options_.eps,
                               .momentum = options_.momentum,
                               .relu = options_.relu});
}

std::shared_ptr<Module> BatchNorm1d::make_like() const {
  return std::make_shared<BatchNorm1d>(channels(), options_);
}
std::shared_ptr<Module> BatchNorm2d::make_like() const {
  return std::make_shared<BatchNorm2d>(channels(), options_);
}

LayerNorm::LayerNorm(std::int64_t size, const LayerNormOptions& options)
    : size_(size), options_(options) {
  CAIRN_CHECK(size > 0, "LayerNorm", "expected a positive size, got ", size);
  if (options.affine) {
    weight_ = add_parameter("weight", constant_parameter(size, 1.0));
    bias_ = add_parameter("bias", constant_parameter(size, 0.0));
  }
  extra_ = core::str(size);
}

Tensor LayerNorm::forward(const Tensor& x) {
  check_last("LayerNorm", x, size_);
  return autograd::layer_norm(x, weight_, bias_, options_.eps);
}
std::shared_ptr<Module> LayerNorm::make_like() const {
  return std::make_shared<LayerNorm>(size_, options_);
}

RMSNorm::RMSNorm(std::int64_t size, double eps) : eps_(eps) {
  CAIRN_CHECK(size > 0, "RMSNorm", "expected a positive size, got ", size);
  weight_ = add_parameter("weight", constant_parameter(size, 1.0));
  extra_ = core::str(size);
}

Tensor RMSNorm::forward(const Tensor& x) {
  check_last("RMSNorm", x, weight_.size(0));
  return autograd::rms_norm(x, weight_, eps_);
}
std::shared_ptr<Module> RMSNorm::make_like() const {
  return std::make_shared<RMSNorm>(weight_.size(0), eps_);
}

}  // namespace cairn::nn
