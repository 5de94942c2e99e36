#include "cairn/nn/norm.h"

#include "cairn/autograd/thread_state.h"
#include "parameters.h"

namespace cairn::nn {

namespace {
void check_last(const char* kind, const Tensor& x, std::int64_t size) {
  CAIRN_CHECK(x.dims() >= 1 && x.size(-1) == size, kind, "expected x [..., ", size, "], got ",
              x.shape());
}

std::string shape_in_words(std::int64_t channels, int dims) {
  constexpr const char* kPixels[] = {"", ", L", ", H, W", ", D, H, W"};
  return core::str("[N, ", channels, kPixels[dims - 2], "]");
}

/// [N, C, L] and [N, C, D, H, W] as images.
Tensor as_image(const Tensor& x) {
  if (x.dims() == 3) return autograd::reshape(x, {x.size(0), x.size(1), 1, x.size(2)});
  if (x.dims() != 5) return x;
  return autograd::reshape(x, {x.size(0), x.size(1), x.size(2) * x.size(3), x.size(4)});
}
}  // namespace

BatchNorm::BatchNorm(std::int64_t channels, int least, int most, const BatchNormOptions& options)
    : options_(options), least_(least), most_(most) {
  CAIRN_CHECK(channels > 0, "BatchNorm", "expected at least one channel, got ", channels);
  if (options.affine) {
    weight_ = add_parameter("weight", constant_parameter(channels, 1.0));
    bias_ = add_parameter("bias", constant_parameter(channels, 0.0));
  }
  running_mean_ = add_buffer("running_mean", constant_parameter(channels, 0.0));
  running_var_ = add_buffer("running_var", constant_parameter(channels, 1.0));
  if (!options.momentum) {
    batches_ = add_buffer("num_batches_tracked", Tensor::zeros({}, DType::i64));
  }
  extra_ = core::str(channels, options.relu ? ", relu" : "");
}

Tensor BatchNorm::forward(const Tensor& x) {
  return normalise(x, options_.relu);
}

void BatchNorm::check(const Tensor& x) const {
  if (x.dims() >= least_ && x.dims() <= most_ && x.size(1) == channels()) return;
  std::string expected;
  for (int dims = least_; dims <= most_; ++dims) {
    expected += (expected.empty() ? "" : " or ") + shape_in_words(channels(), dims);
  }
  core::fail(kind(), "expected x ", expected, ", got ", x.shape());
}

Tensor BatchNorm::normalise(const Tensor& given, bool relu) {
  check(given);
  const Tensor x = as_image(given);
  const autograd::BatchNormOptions options{.training = training(),
                                           .eps = options_.eps,
                                           .momentum = training() ? next_momentum() : 0.0,
                                           .relu = relu};
  const Tensor y =
      training() && function_
          ? function_(x, weight_, bias_, running_mean_, running_var_, options)
          : autograd::batch_norm(x, weight_, bias_, running_mean_, running_var_, options);
  return x.same(given) ? y : autograd::reshape(y, given.shape());
}

// A replay sees the same batch a second time: it was counted before.
double BatchNorm::next_momentum() {
  if (options_.momentum || autograd::recomputing()) return options_.momentum.value_or(0.0);
  const double batches = batches_.item() + 1.0;
  kernels::fill(batches_, batches);
  return 1.0 / batches;
}

std::shared_ptr<Module> BatchNorm1d::make_like() const {
  return like_this<BatchNorm1d>();
}
std::shared_ptr<Module> BatchNorm2d::make_like() const {
  return like_this<BatchNorm2d>();
}
std::shared_ptr<Module> BatchNorm3d::make_like() const {
  return like_this<BatchNorm3d>();
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

GroupNorm::GroupNorm(std::int64_t groups, std::int64_t channels, const GroupNormOptions& options)
    : groups_(groups), channels_(channels), options_(options) {
  CAIRN_CHECK(groups > 0 && channels > 0 && channels % groups == 0, "GroupNorm",
              "expected channels that are a multiple of the groups, got ", channels,
              " channels and ", groups, " groups");
  if (options.affine) {
    weight_ = add_parameter("weight", constant_parameter(channels, 1.0));
    bias_ = add_parameter("bias", constant_parameter(channels, 0.0));
  }
  extra_ = core::str(channels, " in ", groups, " groups");
}

Tensor GroupNorm::forward(const Tensor& x) {
  CAIRN_CHECK(x.dims() >= 2 && x.size(1) == channels_, "GroupNorm", "expected x [N, ", channels_,
              ", ...], got ", x.shape());
  return autograd::group_norm(x, groups_, weight_, bias_, options_.eps);
}
std::shared_ptr<Module> GroupNorm::make_like() const {
  return std::make_shared<GroupNorm>(groups_, channels_, options_);
}

std::shared_ptr<Module> InstanceNorm::make_like() const {
  return std::make_shared<InstanceNorm>(channels(), options_);
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
