// The simulated cuDNN's descriptors: which attributes each has, and what its finalisation makes of
// them.
#pragma once

#include <cudnn.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "gpu/sim/cudnn_attention.h"
#include "gpu/sim/cudnn_convolution.h"

namespace cairn::gpusim {

struct CudnnAttribute {
  cudnnBackendAttributeType_t type = CUDNN_TYPE_INT64;
  std::int64_t count = 0;
  std::vector<char> bytes;
};

struct CudnnDescriptor {
  cudnnBackendDescriptorType_t type = CUDNN_BACKEND_TENSOR_DESCRIPTOR;
  bool finalized = false;
  std::map<cudnnBackendAttributeName_t, CudnnAttribute> attributes;
  std::vector<CudnnDescriptor*> refers_to;  // must live until the finalisation of what refers to it

  // What was made of them: of a descriptor by itself, or of those that it refers to.
  CudnnTensor tensor;
  CudnnConvolution problem;
  CudnnOperation operation;                         // of an attention
  std::shared_ptr<const CudnnAttention> attention;  // in place of a convolution
  CudnnConfig config;
  std::vector<CudnnConfig> results;
  cudnnHandle_t handle = nullptr;
  std::shared_ptr<bool> unloaded;  // of a plan: whether its code is gone

  template <class T>
  std::vector<T> values(cudnnBackendAttributeName_t name) const;
  template <class T>
  T value(cudnnBackendAttributeName_t name, T otherwise = {}) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) return otherwise;
    T first{};
    std::memcpy(&first, found->second.bytes.data(), sizeof(first));
    return first;
  }
};

/// What the graph behind it asks of a workspace.
std::size_t workspace_of(const CudnnDescriptor& plan);

/// The name that finalisations of the type are counted and refused by:
/// "cudnnBackendFinalize(plan)".
const char* finalize_name(cudnnBackendDescriptorType_t type);

/// Whether the simulator knows the type.
bool is_known(cudnnBackendDescriptorType_t type);

/// The descriptors among `values` are live.
cudnnStatus_t set_attribute(CudnnDescriptor& descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t count,
                            const void* values);

/// What it refers to is live. `capability`: of the GPUs, 90 for 9.0.
cudnnStatus_t finalize(CudnnDescriptor& descriptor, int capability);

/// Descriptors are written into those that `values` names, which are live.
cudnnStatus_t get_attribute(const CudnnDescriptor& descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t most,
                            std::int64_t* count, void* values);

template <class T>
std::vector<T> CudnnDescriptor::values(cudnnBackendAttributeName_t name) const {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return {};
  const auto* first = reinterpret_cast<const T*>(found->second.bytes.data());
  return {first, first + found->second.count};
}

}  // namespace cairn::gpusim
