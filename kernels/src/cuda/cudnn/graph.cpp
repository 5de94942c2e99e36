#include "cuda/cudnn/graph.h"

#include <utility>

namespace cairn::kernels::cuda {

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

const Descriptor& OperationGraph::tensor(const GraphTensor& described) {
  Descriptor tensor(op_, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, described.id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, described.type);
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, described.alignment);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, described.sizes);
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, described.strides);
  if (described.is_virtual) tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, true);
  if (described.is_by_value) tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
  tensor.finalize();
  return keep(std::move(tensor));
}

const Descriptor& OperationGraph::keep(Descriptor descriptor) {
  return kept_.emplace_back(std::move(descriptor));
}

void OperationGraph::add(Descriptor operation) {
  supported_ = supported_ && operation.finalize_if_supported();
  operations_.push_back(std::move(operation));
}

void OperationGraph::finish(const CudnnHandle& handle) {
  if (!supported_) return;
  graph_.emplace(op_, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph_->set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, cudnnHandle_t{handle});
  graph_->set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operations_);
  supported_ = graph_->finalize_if_supported();
}

}  // namespace cairn::kernels::cuda
