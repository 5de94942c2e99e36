#include "cuda/cudnn/conv_graph.h"

namespace cairn::kernels::cuda {
namespace {

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

std::array<std::int64_t, 4> strides(const std::array<std::int64_t, 4>& size, StorageOrder storage) {
  const auto [n, c, h, w] = size;
  if (storage == StorageOrder::channels_last) return {c * h * w, 1, w * c, c};
  return {c * h * w, h * w, w, 1};
}

Descriptor tensor(const char* op, const ConvShape& shape, std::int64_t id,
                  const std::array<std::int64_t, 4>& size) {
  Descriptor tensor(op, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, cudnn_type(shape.dtype));
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kConvAlignment);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, size);
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, strides(size, shape.storage));
  tensor.finalize();
  return tensor;
}

Descriptor convolution(const char* op, const ConvShape& shape) {
  Descriptor convolution(op, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_CROSS_CORRELATION);
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, std::int64_t{2});
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, shape.padding);
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, shape.padding);
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, shape.dilation);
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, shape.stride);
  convolution.finalize();
  return convolution;
}

/// The names of a pass's operation and of its attributes.
struct OperationNames {
  cudnnBackendDescriptorType_t type;
  Descriptor::Name x, weight, y, convolution, alpha, beta;
};

OperationNames names_of(ConvPass pass) {
  switch (pass) {
    case ConvPass::forward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case ConvPass::backward_data:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    case ConvPass::backward_weight:
      break;
  }
  return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
}

}  // namespace

ConvGraph::ConvGraph(const Queue& queue, const CudnnHandle& handle, const ConvShape& shape)
    : x_(tensor(queue.op(), shape, kConvTensors[0], shape.x)),
      weight_(tensor(queue.op(), shape, kConvTensors[1], shape.weight)),
      y_(tensor(queue.op(), shape, kConvTensors[2], shape.y)),
      convolution_(convolution(queue.op(), shape)),
      operation_(queue.op(), names_of(shape.pass).type),
      graph_(queue.op(), CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) {
  const OperationNames names = names_of(shape.pass);
  operation_.set(names.x, x_);
  operation_.set(names.weight, weight_);
  operation_.set(names.y, y_);
  operation_.set(names.convolution, convolution_);
  operation_.set(names.alpha, 1.0f);
  operation_.set(names.beta, 0.0f);
  if (!operation_.finalize_if_supported()) return;
  graph_.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, cudnnHandle_t{handle});
  graph_.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation_);
  supported_ = graph_.finalize_if_supported();
}

}  // namespace cairn::kernels::cuda
