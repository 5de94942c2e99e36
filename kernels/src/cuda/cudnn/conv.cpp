// Convolutions through cuDNN, channels-last first; where it has no deterministic algorithm for that
// storage, row-major. Weights are [O, I / groups, kH, kW] row-major outside and take the images'
// storage here: a copy of the weight a call.
//
// A weight gradient in f32 beside half images is computed in half (accumulated in f32 inside cuDNN,
// rounded once) and then added.
#include "cuda/cudnn/conv_plan.h"
#include "cuda/cudnn/handle.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

std::array<std::int64_t, 4> sizes(View x) {
  return {x.shape[0], x.shape[1], x.shape[2], x.shape[3]};
}

/// The plan of a pass over image x, weight and result y.
struct Convolution {
  std::shared_ptr<const ConvPlan> plan;
  StorageOrder storage;

  Convolution(const Queue& queue, ConvPass pass, View x, View weight, View y,
              const Conv2dOptions& options) {
    ConvShape shape;
    shape.device = queue.device().index, shape.pass = pass, shape.dtype = x.dtype;
    shape.x = sizes(x), shape.weight = sizes(weight), shape.y = sizes(y);
    shape.stride = options.stride, shape.padding = options.padding;
    shape.dilation = options.dilation, shape.groups = options.groups;
    for (StorageOrder order : {StorageOrder::channels_last, StorageOrder::row_major}) {
      shape.storage = storage = order;
      plan = conv_plan_for(queue, shape);
      if (plan) return;
    }
    core::fail<core::DeviceError>(
        queue.op(), "expected cuDNN to have a deterministic algorithm for x ", x.shape,
        " and weight ", weight.shape, " of ", core::name(x.dtype), ", got none");
  }
};

TensorView per_channel(View bias) {
  return bias.reshape({1, bias.shape[0], 1, 1});
}

void add_bias(const CudaBackend& backend, View bias, View y) {
  if (bias.defined()) backend.axpby(1.0, per_channel(bias).expand(y.shape), 1.0, y);
}

constexpr float kOne = 1.0f, kZero = 0.0f;

}  // namespace

void CudaBackend::conv2d(View x, View weight, View bias, View y,
                         const Conv2dOptions& options) const {
  const Queue queue("conv2d", y.device);
  if (x.numel() == 0) {
    fill(y, 0.0);
    add_bias(*this, bias, y);
    return;
  }
  const Convolution c(queue, ConvPass::forward, x, weight, y, options);
  const Input in(*this, queue, x, c.storage), w(*this, queue, weight, c.storage);
  const Output out(*this, queue, y, c.storage);
  const auto workspace = queue.workspace(c.plan->workspace);
  check_cudnn(cudnnConvolutionForward(CudnnHandle(queue), &kOne, c.plan->x, in.view().data,
                                      c.plan->weight, w.view().data, c.plan->convolution,
                                      static_cast<cudnnConvolutionFwdAlgo_t>(c.plan->algorithm),
                                      workspace->data(), c.plan->workspace, &kZero, c.plan->y,
                                      out.view().data),
              "conv2d", "cudnnConvolutionForward");
  out.finish();
  add_bias(*this, bias, y);
}

void CudaBackend::conv2d_backward_data(View dy, View weight, View bias, View dx,
                                       const Conv2dOptions& options) const {
  const Queue queue("conv2d_backward_data", dx.device);
  if (dy.numel() == 0) {
    fill(dx, 0.0);
    add_bias(*this, bias, dx);
    return;
  }
  const Convolution c(queue, ConvPass::backward_data, dx, weight, dy, options);
  const Input grad(*this, queue, dy, c.storage), w(*this, queue, weight, c.storage);
  const Output out(*this, queue, dx, c.storage);
  const auto workspace = queue.workspace(c.plan->workspace);
  check_cudnn(
      cudnnConvolutionBackwardData(
          CudnnHandle(queue), &kOne, c.plan->weight, w.view().data, c.plan->y, grad.view().data,
          c.plan->convolution, static_cast<cudnnConvolutionBwdDataAlgo_t>(c.plan->algorithm),
          workspace->data(), c.plan->workspace, &kZero, c.plan->x, out.view().data),
      "conv2d_backward_data", "cudnnConvolutionBackwardData");
  out.finish();
  add_bias(*this, bias, dx);
}

void CudaBackend::conv2d_backward_weight(View x, View dy, View dweight, View dbias,
                                         const Conv2dOptions& options, bool accumulate) const {
  const Queue queue("conv2d_backward_weight", x.device);
  if (dbias.defined()) reduce(ReduceOp::sum, dy, per_channel(dbias), accumulate);
  if (x.numel() == 0) {
    if (!accumulate) fill(dweight, 0.0);
    return;
  }
  const Convolution c(queue, ConvPass::backward_weight, x, dweight, dy, options);
  const Input in(*this, queue, x, c.storage), grad(*this, queue, dy, c.storage);
  TensorView like = dweight;
  like.dtype = x.dtype;
  const bool in_place = like.dtype == dweight.dtype && !accumulate && is_stored(dweight, c.storage);
  const Fresh fresh(queue, like, c.storage);
  View target = in_place ? dweight : fresh.view();
  const auto workspace = queue.workspace(c.plan->workspace);
  check_cudnn(
      cudnnConvolutionBackwardFilter(
          CudnnHandle(queue), &kOne, c.plan->x, in.view().data, c.plan->y, grad.view().data,
          c.plan->convolution, static_cast<cudnnConvolutionBwdFilterAlgo_t>(c.plan->algorithm),
          workspace->data(), c.plan->workspace, &kZero, c.plan->weight, target.data),
      "conv2d_backward_weight", "cudnnConvolutionBackwardFilter");
  if (!in_place) axpby(1.0, target, accumulate ? 1.0 : 0.0, dweight);
}

}  // namespace cairn::kernels
