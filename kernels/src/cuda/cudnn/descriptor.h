// A descriptor of cuDNN's graph API: made, given attributes one by one, and finalised; from then on
// it may be read, named by other descriptors and no longer changed.
//
//   Descriptor heuristics(op, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
//   heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A);
//   if (heuristics.finalize_if_supported()) ...
//
// Any other status of cuDNN's than success is a DeviceError.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/cudnn/handle.h"

namespace cairn::kernels::cuda {

// How cuDNN names a C++ type.
constexpr cudnnBackendAttributeType_t attribute_type(std::int64_t) {
  return CUDNN_TYPE_INT64;
}
constexpr cudnnBackendAttributeType_t attribute_type(bool) {
  return CUDNN_TYPE_BOOLEAN;
}
constexpr cudnnBackendAttributeType_t attribute_type(float) {
  return CUDNN_TYPE_FLOAT;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnHandle_t) {
  return CUDNN_TYPE_HANDLE;
}
constexpr cudnnBackendAttributeType_t attribute_type(void*) {
  return CUDNN_TYPE_VOID_PTR;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnDataType_t) {
  return CUDNN_TYPE_DATA_TYPE;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnPointwiseMode_t) {
  return CUDNN_TYPE_POINTWISE_MODE;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnReduceTensorOp_t) {
  return CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnConvolutionMode_t) {
  return CUDNN_TYPE_CONVOLUTION_MODE;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnBackendHeurMode_t) {
  return CUDNN_TYPE_HEUR_MODE;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnBackendKnobType_t) {
  return CUDNN_TYPE_KNOB_TYPE;
}
constexpr cudnnBackendAttributeType_t attribute_type(cudnnBackendNumericalNote_t) {
  return CUDNN_TYPE_NUMERICAL_NOTE;
}

class Descriptor {
 public:
  using Name = cudnnBackendAttributeName_t;

  Descriptor(const char* op, cudnnBackendDescriptorType_t type);

  template <class T>
  void set(Name name, T value) {
    set_raw(name, attribute_type(T{}), 1, &value);
  }
  template <class T, std::size_t N>
  void set(Name name, const std::array<T, N>& values) {
    set_raw(name, attribute_type(T{}), N, values.data());
  }
  template <class T>
  void set(Name name, const std::vector<T>& values) {
    set_raw(name, attribute_type(T{}), values.size(), values.data());
  }
  void set(Name name, const Descriptor& other);
  void set(Name name, const std::vector<Descriptor>& others);

  void finalize();
  cudnnStatus_t try_finalize() { return cudnnBackendFinalize(raw()); }
  /// False where cuDNN does not support what was described.
  bool finalize_if_supported();

  template <class T>
  T get(Name name) const {
    T value{};
    std::int64_t count = 0;
    get_raw(name, attribute_type(T{}), 1, &count, &value);
    return value;
  }
  /// Of at most `most` values.
  template <class T>
  std::vector<T> get_all(Name name, std::size_t most) const {
    std::vector<T> values(most);
    std::int64_t count = 0;
    get_raw(name, attribute_type(T{}), static_cast<std::int64_t>(most), &count, values.data());
    values.resize(std::min(most, static_cast<std::size_t>(count)));
    return values;
  }
  /// The descriptors of an attribute, which are of this type; at most `most`, where that is given.
  std::vector<Descriptor> get_all(Name name, cudnnBackendDescriptorType_t type,
                                  std::optional<std::size_t> most = {}) const;

  cudnnBackendDescriptor_t raw() const { return raw_.get(); }

 private:
  struct Destroy {
    void operator()(void* descriptor) const { cudnnBackendDestroyDescriptor(descriptor); }
  };

  void set_raw(Name name, cudnnBackendAttributeType_t type, std::size_t count, const void* values);
  void get_raw(Name name, cudnnBackendAttributeType_t type, std::int64_t most, std::int64_t* count,
               void* values) const;

  const char* op_;
  std::unique_ptr<void, Destroy> raw_;
};

}  // namespace cairn::kernels::cuda
