// The simulated cuDNN's attention: an operation graph that is computed operation by operation, if
// it is one that cuDNN's fused engines know.
#pragma once

#include <cudnn.h>

#include <map>
#include <string>
#include <vector>

#include "gpu/sim/cudnn_convolution.h"
#include "gpu/sim/cudnn_tensor.h"

namespace cairn::gpusim {

struct CudnnOperation {
  enum class Kind { matmul, pointwise, reduction, reshape };
  Kind kind = Kind::matmul;
  int mode = 0;  // cudnnPointwiseMode_t or cudnnReduceTensorOp_t
  std::int64_t axis = -1;
  cudnnDataType_t compute = CUDNN_DATA_FLOAT;
  std::vector<CudnnTensor> inputs;  // x, and what else there is: the other, the choice
  CudnnTensor y;
};

/// The operations of a graph in their order.
struct CudnnAttention {
  std::vector<CudnnOperation> operations;
  int capability = 0;  // of the GPUs, 90 for 9.0

  /// Whether every tensor inside is written once, before it is read.
  bool is_consistent() const;
  /// The operations by a letter each: "M*X-eAl+/M".
  std::string text() const;
  bool is_forward() const;
  /// Where dq is a product of its own, as deterministic ones have it.
  bool is_backward() const;
  std::vector<CudnnTensor> arguments() const;  // what a variant pack names
};

std::vector<CudnnEngine> engines_of(const CudnnAttention& graph);
std::vector<CudnnConfig> proposals(const CudnnAttention& graph, cudnnBackendHeurMode_t mode);
cudnnStatus_t check_support(const CudnnAttention& graph, const CudnnConfig& config);
std::size_t workspace_of(const CudnnAttention& graph, const CudnnConfig& config);

/// By id: device memory, and the numbers that are passed by value. Inside work.
void run_attention(const CudnnAttention& graph, const CudnnConfig& config,
                   const std::map<std::int64_t, void*>& data,
                   const std::map<std::int64_t, double>& numbers);

}  // namespace cairn::gpusim
