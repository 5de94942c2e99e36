#include "cuda/cudnn/conv_graph.h"

#include <utility>

namespace cairn::kernels::cuda {
namespace {

std::array<std::int64_t, 4> strides(const std::array<std::int64_t, 4>& size, StorageOrder storage) {
  const auto [n, c, h, w] = size;
  if (storage == StorageOrder::channels_last) return {c * h * w, 1, w * c, c};
  return {c * h * w, h * w, w, 1};
}

const Descriptor& image(OperationGraph& graph, const ConvShape& shape, std::int64_t id,
                        const std::array<std::int64_t, 4>& size) {
  return graph.tensor({.id = id,
                       .type = cudnn_type(shape.dtype),
                       .alignment = kConvAlignment,
                       .sizes = size,
                       .strides = strides(size, shape.storage)});
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

OperationGraph conv_graph(const Queue& queue, const CudnnHandle& handle, const ConvShape& shape) {
  OperationGraph graph(queue.op());
  const OperationNames names = names_of(shape.pass);
  Descriptor operation(queue.op(), names.type);
  operation.set(names.x, image(graph, shape, kConvTensors[0], shape.x));
  operation.set(names.weight, image(graph, shape, kConvTensors[1], shape.weight));
  operation.set(names.y, image(graph, shape, kConvTensors[2], shape.y));
  operation.set(names.convolution, graph.keep(convolution(queue.op(), shape)));
  operation.set(names.alpha, 1.0f);
  operation.set(names.beta, 0.0f);
  graph.add(std::move(operation));
  graph.finish(handle);
  return graph;
}

}  // namespace cairn::kernels::cuda
