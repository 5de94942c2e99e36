#include "cuda/cudnn/conv_plan.h"

#include <algorithm>
#include <limits>

#include "cuda/bounded_cache.h"
#include "cuda/cudnn/handle.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kKeptPlans = 1024;
constexpr std::size_t kMostWorkspace = std::size_t{1} << 30;
constexpr int kMostAlgorithms = 16;
constexpr std::int64_t kMostElements = std::numeric_limits<std::int32_t>::max();

cudnnDataType_t cudnn_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return CUDNN_DATA_HALF;
    case DType::bf16:
      return CUDNN_DATA_BFLOAT16;
    default:
      return CUDNN_DATA_FLOAT;
  }
}

int to_int(std::int64_t size) {
  return static_cast<int>(size);
}

void describe(const Queue& queue, const ConvShape& shape, ConvPlan& plan) {
  const auto format =
      shape.storage == StorageOrder::channels_last ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW;
  const auto type = cudnn_type(shape.dtype);
  const auto tensor = [&](cudnnTensorDescriptor_t descriptor,
                          const std::array<std::int64_t, 4>& s) {
    check_cudnn(cudnnSetTensor4dDescriptor(descriptor, format, type, to_int(s[0]), to_int(s[1]),
                                           to_int(s[2]), to_int(s[3])),
                queue.op(), "cudnnSetTensor4dDescriptor");
  };
  tensor(plan.x, shape.x);
  tensor(plan.y, shape.y);
  const auto& w = shape.weight;
  check_cudnn(cudnnSetFilter4dDescriptor(plan.weight, type, format, to_int(w[0]), to_int(w[1]),
                                         to_int(w[2]), to_int(w[3])),
              queue.op(), "cudnnSetFilter4dDescriptor");
}

ConvAlgorithm convolution(const Queue& queue, const ConvShape& shape, cudnnMathType_t math) {
  cudnnConvolutionDescriptor_t made = nullptr;
  check_cudnn(cudnnCreateConvolutionDescriptor(&made), queue.op(),
              "cudnnCreateConvolutionDescriptor");
  ConvAlgorithm algorithm;
  algorithm.convolution.reset(made);
  check_cudnn(cudnnSetConvolution2dDescriptor(
                  made, to_int(shape.padding[0]), to_int(shape.padding[1]), to_int(shape.stride[0]),
                  to_int(shape.stride[1]), to_int(shape.dilation[0]), to_int(shape.dilation[1]),
                  CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT),
              queue.op(), "cudnnSetConvolution2dDescriptor");
  check_cudnn(cudnnSetConvolutionGroupCount(made, to_int(shape.groups)), queue.op(),
              "cudnnSetConvolutionGroupCount");
  check_cudnn(cudnnSetConvolutionMathType(made, math), queue.op(), "cudnnSetConvolutionMathType");
  return algorithm;
}

cudnnStatus_t ask_workspace(cudnnHandle_t handle, ConvPass pass, const ConvPlan& plan,
                            ConvAlgorithm& a) {
  switch (pass) {
    case ConvPass::forward:
      return cudnnGetConvolutionForwardWorkspaceSize(
          handle, plan.x, plan.weight, a.convolution.get(), plan.y,
          static_cast<cudnnConvolutionFwdAlgo_t>(a.number), &a.workspace);
    case ConvPass::backward_data:
      return cudnnGetConvolutionBackwardDataWorkspaceSize(
          handle, plan.weight, plan.y, a.convolution.get(), plan.x,
          static_cast<cudnnConvolutionBwdDataAlgo_t>(a.number), &a.workspace);
    case ConvPass::backward_weight:
      break;
  }
  return cudnnGetConvolutionBackwardFilterWorkspaceSize(
      handle, plan.x, plan.y, a.convolution.get(), plan.weight,
      static_cast<cudnnConvolutionBwdFilterAlgo_t>(a.number), &a.workspace);
}

/// A search that finds the shape unsupported is an answer, not a failure.
bool answered(cudnnStatus_t status, const Queue& queue, const char* call) {
  if (is_unsupported(status)) return false;
  check_cudnn(status, queue.op(), call);
  return true;
}

/// f32 is computed in f32, unless TF32 is allowed.
cudnnMathType_t math_for(const ConvShape& shape, cudnnMathType_t wanted) {
  return shape.dtype == DType::f32 && !shape.tf32 ? CUDNN_FMA_MATH : wanted;
}

template <class Found>
void keep_usable(const Queue& queue, cudnnHandle_t handle, const ConvShape& shape,
                 const Found* found, int count, ConvPlan& plan) {
  for (int k = 0; k < count; ++k) {
    if (found[k].status != CUDNN_STATUS_SUCCESS || found[k].determinism != CUDNN_DETERMINISTIC)
      continue;
    ConvAlgorithm algorithm = convolution(queue, shape, math_for(shape, found[k].mathType));
    algorithm.number = static_cast<int>(found[k].algo);
    // What the search says of memory holds for the descriptor that it was given.
    const cudnnStatus_t status = ask_workspace(handle, shape.pass, plan, algorithm);
    if (!answered(status, queue, "cudnnGetConvolution*WorkspaceSize")) continue;
    if (algorithm.workspace <= kMostWorkspace) plan.algorithms.push_back(std::move(algorithm));
  }
}

void search(const Queue& queue, const ConvShape& shape, ConvPlan& plan) {
  const CudnnHandle handle(queue);
  const ConvAlgorithm any = convolution(queue, shape, math_for(shape, CUDNN_TENSOR_OP_MATH));
  const cudnnConvolutionDescriptor_t how = any.convolution.get();
  const auto run = [&](auto* found, auto get, const char* call, auto... descriptors) {
    int count = 0;
    const cudnnStatus_t status = get(handle, descriptors..., kMostAlgorithms, &count, found);
    if (answered(status, queue, call)) keep_usable(queue, handle, shape, found, count, plan);
  };
  switch (shape.pass) {
    case ConvPass::forward: {
      cudnnConvolutionFwdAlgoPerf_t found[kMostAlgorithms];
      return run(found, cudnnGetConvolutionForwardAlgorithm_v7,
                 "cudnnGetConvolutionForwardAlgorithm_v7", plan.x, plan.weight, how, plan.y);
    }
    case ConvPass::backward_data: {
      cudnnConvolutionBwdDataAlgoPerf_t found[kMostAlgorithms];
      return run(found, cudnnGetConvolutionBackwardDataAlgorithm_v7,
                 "cudnnGetConvolutionBackwardDataAlgorithm_v7", plan.weight, plan.y, how, plan.x);
    }
    case ConvPass::backward_weight: {
      cudnnConvolutionBwdFilterAlgoPerf_t found[kMostAlgorithms];
      return run(found, cudnnGetConvolutionBackwardFilterAlgorithm_v7,
                 "cudnnGetConvolutionBackwardFilterAlgorithm_v7", plan.x, plan.y, how, plan.weight);
    }
  }
}

}  // namespace

ConvPlan::ConvPlan() {
  check_cudnn(cudnnCreateTensorDescriptor(&x), "conv2d", "cudnnCreateTensorDescriptor");
  check_cudnn(cudnnCreateTensorDescriptor(&y), "conv2d", "cudnnCreateTensorDescriptor");
  check_cudnn(cudnnCreateFilterDescriptor(&weight), "conv2d", "cudnnCreateFilterDescriptor");
}

ConvPlan::~ConvPlan() {
  cudnnDestroyTensorDescriptor(x);
  cudnnDestroyTensorDescriptor(y);
  cudnnDestroyFilterDescriptor(weight);
}

std::shared_ptr<const ConvPlan> conv_plan_for(const Queue& queue, const ConvShape& shape) {
  static auto& plans = *new BoundedCache<ConvShape, std::shared_ptr<const ConvPlan>>(kKeptPlans);
  return plans.get(shape, [&] {
    auto plan = std::make_shared<ConvPlan>();
    describe(queue, shape, *plan);
    search(queue, shape, *plan);
    return plan;
  });
}

std::int64_t images_at_once(const char* op, const Shape& x, const Shape& weight, const Shape& y) {
  const std::int64_t image = std::max(x.numel() / x[0], y.numel() / y[0]);
  if (image > kMostElements || weight.numel() > kMostElements) {
    core::fail<core::Unsupported>(op, "expected images and a weight of at most ", kMostElements,
                                  " elements each, which is cuDNN's limit, got x ", x, ", weight ",
                                  weight, " and y ", y);
  }
  return kMostElements / image;
}

}  // namespace cairn::kernels::cuda
