#include "cuda/cudnn/conv_plan.h"

#include "cuda/bounded_cache.h"
#include "cuda/cudnn/handle.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kKeptPlans = 1024;
constexpr std::size_t kMostWorkspace = std::size_t{1} << 30;
constexpr int kMostAlgorithms = 16;

cudnnDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return CUDNN_DATA_HALF;
    case DType::bf16:
      return CUDNN_DATA_BFLOAT16;
    default:
      return CUDNN_DATA_FLOAT;
  }
}

void describe(const Queue& queue, const ConvShape& shape, ConvPlan& plan) {
  const auto format =
      shape.storage == StorageOrder::channels_last ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW;
  const auto type = data_type(shape.dtype);
  const auto i = [](std::int64_t size) { return static_cast<int>(size); };
  const auto tensor = [&](cudnnTensorDescriptor_t descriptor,
                          const std::array<std::int64_t, 4>& s) {
    check_cudnn(
        cudnnSetTensor4dDescriptor(descriptor, format, type, i(s[0]), i(s[1]), i(s[2]), i(s[3])),
        queue.op(), "cudnnSetTensor4dDescriptor");
  };
  tensor(plan.x, shape.x);
  tensor(plan.y, shape.y);
  const auto& w = shape.weight;
  check_cudnn(
      cudnnSetFilter4dDescriptor(plan.weight, type, format, i(w[0]), i(w[1]), i(w[2]), i(w[3])),
      queue.op(), "cudnnSetFilter4dDescriptor");
  check_cudnn(cudnnSetConvolution2dDescriptor(
                  plan.convolution, i(shape.padding[0]), i(shape.padding[1]), i(shape.stride[0]),
                  i(shape.stride[1]), i(shape.dilation[0]), i(shape.dilation[1]),
                  CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT),
              queue.op(), "cudnnSetConvolution2dDescriptor");
  check_cudnn(cudnnSetConvolutionGroupCount(plan.convolution, i(shape.groups)), queue.op(),
              "cudnnSetConvolutionGroupCount");
  // f32 is computed in f32, not TF32.
  const auto math = shape.dtype == DType::f32 ? CUDNN_FMA_MATH : CUDNN_TENSOR_OP_MATH;
  check_cudnn(cudnnSetConvolutionMathType(plan.convolution, math), queue.op(),
              "cudnnSetConvolutionMathType");
}

template <class Found>
bool take_first_usable(const Queue& queue, const Found* found, int count, ConvPlan& plan) {
  for (int k = 0; k < count; ++k) {
    const bool usable = found[k].status == CUDNN_STATUS_SUCCESS &&
                        found[k].determinism == CUDNN_DETERMINISTIC &&
                        found[k].memory <= kMostWorkspace;
    if (!usable) continue;
    plan.algorithm = static_cast<int>(found[k].algo);
    plan.workspace = found[k].memory;
    check_cudnn(cudnnSetConvolutionMathType(plan.convolution, found[k].mathType), queue.op(),
                "cudnnSetConvolutionMathType");
    return true;
  }
  return false;
}

/// A search that finds the shape unsupported is an answer, not a failure.
bool answered(cudnnStatus_t status, const Queue& queue, const char* call) {
  if (CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED) return false;
  check_cudnn(status, queue.op(), call);
  return true;
}

bool choose(const Queue& queue, const ConvShape& shape, ConvPlan& plan) {
  const CudnnHandle handle(queue);
  int count = 0;
  switch (shape.pass) {
    case ConvPass::forward: {
      cudnnConvolutionFwdAlgoPerf_t found[kMostAlgorithms];
      return answered(cudnnGetConvolutionForwardAlgorithm_v7(handle, plan.x, plan.weight,
                                                             plan.convolution, plan.y,
                                                             kMostAlgorithms, &count, found),
                      queue, "cudnnGetConvolutionForwardAlgorithm_v7") &&
             take_first_usable(queue, found, count, plan);
    }
    case ConvPass::backward_data: {
      cudnnConvolutionBwdDataAlgoPerf_t found[kMostAlgorithms];
      return answered(cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, plan.weight, plan.y,
                                                                  plan.convolution, plan.x,
                                                                  kMostAlgorithms, &count, found),
                      queue, "cudnnGetConvolutionBackwardDataAlgorithm_v7") &&
             take_first_usable(queue, found, count, plan);
    }
    case ConvPass::backward_weight: {
      cudnnConvolutionBwdFilterAlgoPerf_t found[kMostAlgorithms];
      return answered(cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle, plan.x, plan.y,
                                                                    plan.convolution, plan.weight,
                                                                    kMostAlgorithms, &count, found),
                      queue, "cudnnGetConvolutionBackwardFilterAlgorithm_v7") &&
             take_first_usable(queue, found, count, plan);
    }
  }
  return false;
}

}  // namespace

ConvPlan::ConvPlan() {
  check_cudnn(cudnnCreateTensorDescriptor(&x), "conv2d", "cudnnCreateTensorDescriptor");
  check_cudnn(cudnnCreateTensorDescriptor(&y), "conv2d", "cudnnCreateTensorDescriptor");
  check_cudnn(cudnnCreateFilterDescriptor(&weight), "conv2d", "cudnnCreateFilterDescriptor");
  check_cudnn(cudnnCreateConvolutionDescriptor(&convolution), "conv2d",
              "cudnnCreateConvolutionDescriptor");
}

ConvPlan::~ConvPlan() {
  cudnnDestroyTensorDescriptor(x);
  cudnnDestroyTensorDescriptor(y);
  cudnnDestroyFilterDescriptor(weight);
  cudnnDestroyConvolutionDescriptor(convolution);
}

std::shared_ptr<const ConvPlan> conv_plan_for(const Queue& queue, const ConvShape& shape) {
  static auto& plans = *new BoundedCache<ConvShape, std::shared_ptr<const ConvPlan>>(kKeptPlans);
  return plans.get(shape, [&]() -> std::shared_ptr<const ConvPlan> {
    auto plan = std::make_shared<ConvPlan>();
    describe(queue, shape, *plan);
    if (!choose(queue, shape, *plan)) return nullptr;
    return plan;
  });
}

}  // namespace cairn::kernels::cuda
