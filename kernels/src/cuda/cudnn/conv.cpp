// Convolutions through cuDNN, channels-last first; where it has no deterministic plan for that
// storage, or none that runs, row-major. Weights are [O, I / groups, kH, kW] row-major outside and
// take the images' storage here: a copy of the weight a call.
//
// A weight gradient in f32 beside half images is computed in half (accumulated in f32 inside cuDNN,
// rounded once) and then added. A batch that is too large for cuDNN is computed in parts.
#include <algorithm>

#include "cairn/kernels/tf32.h"
#include "cuda/cudnn/conv_plan.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

std::array<std::int64_t, 4> sizes(View x) {
  return {x.shape[0], x.shape[1], x.shape[2], x.shape[3]};
}

constexpr std::size_t kAlignment = kConvAlignment;  // slices may have less

/// Tries run(plan, storage) with each plan of each storage order until it succeeds.
template <class Run>
void with_plan(const Queue& queue, ConvPass pass, View x, View weight, View y,
               const Conv2dOptions& options, Run run) {
  ConvShape shape;
  shape.device = queue.device().index, shape.pass = pass, shape.dtype = x.dtype;
  shape.x = sizes(x), shape.weight = sizes(weight), shape.y = sizes(y);
  shape.stride = options.stride, shape.padding = options.padding;
  shape.dilation = options.dilation;
  shape.tf32 = x.dtype == DType::f32 && tf32_allowed();
  for (StorageOrder order : {StorageOrder::channels_last, StorageOrder::row_major}) {
    shape.storage = order;
    const auto plans = conv_plans_for(shape);
    for (std::size_t n = 0;; ++n) {
      const auto plan = plans->at(queue, n);
      if (plan == nullptr) break;
      if (run(*plan, order)) return;  // a proposal is no promise
    }
  }
  core::fail<core::DeviceError>(queue.op(), "expected cuDNN to have a deterministic plan for x ",
                                x.shape, " and weight ", weight.shape, " of ", core::name(x.dtype),
                                ", got none");
}

/// Calls part(x's, y's, whether it is the first) for parts of the batch that cuDNN can take.
template <class Part>
void for_parts(const Queue& queue, View x, View weight, View y, Part part) {
  const std::int64_t all = x.shape[0];
  const std::int64_t step = images_at_once(queue.op(), x.shape, weight.shape, y.shape);
  for (std::int64_t begin = 0; begin < all; begin += step) {
    const std::int64_t end = std::min(all, begin + step);
    part(x.slice(0, begin, end), y.slice(0, begin, end), begin == 0);
  }
}

TensorView per_channel(View bias) {
  return bias.reshape({1, bias.shape[0], 1, 1});
}

void add_bias(const CudaBackend& backend, View bias, View y) {
  if (bias.defined()) backend.axpby(1.0, per_channel(bias).expand(y.shape), 1.0, y);
}

void forward(const CudaBackend& backend, const Queue& queue, View x, View weight, View y,
             const Conv2dOptions& options) {
  const auto run = [&](const Plan& plan, StorageOrder storage) {
    const Input in(backend, queue, x, storage, kAlignment);
    const Input w(backend, queue, weight, storage, kAlignment);
    const Output out(backend, queue, y, storage, kAlignment);
    if (!plan.run(queue, conv_arguments(in.view().data, w.view().data, out.view().data)))
      return false;
    out.finish();
    return true;
  };
  with_plan(queue, ConvPass::forward, x, weight, y, options, run);
}

void backward_data(const CudaBackend& backend, const Queue& queue, View dy, View weight, View dx,
                   const Conv2dOptions& options) {
  const auto run = [&](const Plan& plan, StorageOrder storage) {
    const Input grad(backend, queue, dy, storage, kAlignment);
    const Input w(backend, queue, weight, storage, kAlignment);
    const Output out(backend, queue, dx, storage, kAlignment);
    if (!plan.run(queue, conv_arguments(out.view().data, w.view().data, grad.view().data)))
      return false;
    out.finish();
    return true;
  };
  with_plan(queue, ConvPass::backward_data, dx, weight, dy, options, run);
}

void backward_weight(const CudaBackend& backend, const Queue& queue, View x, View dy, View dweight,
                     const Conv2dOptions& options, bool accumulate) {
  TensorView like = dweight;
  like.dtype = x.dtype;
  const auto run = [&](const Plan& plan, StorageOrder storage) {
    const Input in(backend, queue, x, storage, kAlignment);
    const Input grad(backend, queue, dy, storage, kAlignment);
    const bool in_place = like.dtype == dweight.dtype && !accumulate &&
                          is_stored(dweight, storage) && is_aligned(dweight, kAlignment);
    const Fresh fresh(queue, like, storage);
    View target = in_place ? dweight : fresh.view();
    if (!plan.run(queue, conv_arguments(in.view().data, target.data, grad.view().data)))
      return false;
    if (!in_place) backend.axpby(1.0, target, accumulate ? 1.0 : 0.0, dweight);
    return true;
  };
  with_plan(queue, ConvPass::backward_weight, x, dweight, dy, options, run);
}

}  // namespace

void CudaBackend::conv2d(View x, View weight, View bias, View y,
                         const Conv2dOptions& options) const {
  const Queue queue("conv2d", y.device);
  if (x.numel() == 0) {
    fill(y, 0.0);
  } else {
    for_parts(queue, x, weight, y, [&](View x_part, View y_part, bool) {
      forward(*this, queue, x_part, weight, y_part, options);
    });
  }
  add_bias(*this, bias, y);
}

void CudaBackend::conv2d_backward_data(View dy, View weight, View bias, View dx,
                                       const Conv2dOptions& options) const {
  const Queue queue("conv2d_backward_data", dx.device);
  if (dy.numel() == 0) {
    fill(dx, 0.0);
  } else {
    for_parts(queue, dx, weight, dy, [&](View dx_part, View dy_part, bool) {
      backward_data(*this, queue, dy_part, weight, dx_part, options);
    });
  }
  add_bias(*this, bias, dx);
}

void CudaBackend::conv2d_backward_weight(View x, View dy, View dweight, View dbias,
                                         const Conv2dOptions& options, bool accumulate) const {
  const Queue queue("conv2d_backward_weight", x.device);
  if (dbias.defined()) reduce(ReductionKind::sum, dy, per_channel(dbias), accumulate);
  if (x.numel() == 0) {
    if (!accumulate) fill(dweight, 0.0);
    return;
  }
  for_parts(queue, x, dweight, dy, [&](View x_part, View dy_part, bool first) {
    backward_weight(*this, queue, x_part, dy_part, dweight, options, accumulate || !first);
  });
}

}  // namespace cairn::kernels
