// Tensors of the simulated cuDNN: as their descriptors tell them, and their values.
#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <vector>

#include "gpu/sim/elements.h"

namespace cairn::gpusim {

/// Of four dimensions.
struct CudnnTensor {
  std::int64_t id = 0;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::int64_t alignment = 0;
  std::array<std::int64_t, 4> sizes{}, strides{};
  bool is_virtual = false, is_by_value = false;

  bool is_packed(bool channels_last) const;
  Element element() const;  // of one in memory
  std::size_t count() const;
};

using CudnnValues = std::vector<double>;  // row-major

/// The values of a tensor in device memory. Inside work.
CudnnValues load_tensor(const CudnnTensor& tensor, const void* data);
void store_tensor(const CudnnTensor& tensor, void* data, const CudnnValues& values);

}  // namespace cairn::gpusim
