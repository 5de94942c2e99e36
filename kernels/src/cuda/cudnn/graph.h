// An operation graph of cuDNN's, with the descriptors that its operations name.
//
//   OperationGraph graph(op);
//   const Descriptor& x = graph.tensor({.id = 'x', .dtype = DType::f16, .sizes = {...}, ...});
//   Descriptor operation(op, CUDNN_BACKEND_OPERATION_..._DESCRIPTOR);
//   operation.set(CUDNN_ATTR_OPERATION_..._X, x);
//   graph.add(std::move(operation));
//   graph.finish(handle);
#pragma once

#include <array>
#include <deque>
#include <optional>
#include <vector>

#include "cuda/cudnn/descriptor.h"

namespace cairn::kernels::cuda {

using Sizes4 = std::array<std::int64_t, 4>;

cudnnDataType_t cudnn_type(DType dtype);

struct GraphTensor {
  std::int64_t id = 0;  // by which the graph's tensors are told apart
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::int64_t alignment = 16;  // of its address, in bytes
  Sizes4 sizes{}, strides{};
  bool is_virtual = false;   // lives inside the graph
  bool is_by_value = false;  // one number in the host's memory
};

/// The graph names the descriptors beside it, so they live as long.
class OperationGraph {
 public:
  explicit OperationGraph(const char* op) : op_(op) {}

  const char* op() const { return op_; }
  /// A reference that stays good as long as this.
  const Descriptor& tensor(const GraphTensor& described);
  /// Of a finalised descriptor; likewise.
  const Descriptor& keep(Descriptor descriptor);
  /// Takes an operation whose attributes are set.
  void add(Descriptor operation);
  /// After the last operation.
  void finish(const CudnnHandle& handle);

  const Descriptor& graph() const { return *graph_; }
  /// Whether cuDNN knows such a graph at all.
  bool is_supported() const { return supported_; }

 private:
  const char* op_;
  std::deque<Descriptor> kept_;
  std::vector<Descriptor> operations_;
  std::optional<Descriptor> graph_;
  bool supported_ = true;
};

}  // namespace cairn::kernels::cuda
