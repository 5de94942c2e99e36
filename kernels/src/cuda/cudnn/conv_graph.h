// A convolution as an operation graph of cuDNN's, a graph of one operation.
#pragma once

#include <array>

#include "cairn/kernels/conv.h"
#include "cuda/contiguous.h"
#include "cuda/cudnn/graph.h"

namespace cairn::kernels::cuda {

enum class ConvPass : std::uint8_t { forward, backward_data, backward_weight };

struct ConvShape {
  int device = 0;
  ConvPass pass = ConvPass::forward;
  DType dtype = DType::f32;
  StorageOrder storage = StorageOrder::channels_last;  // of images and weight alike
  std::array<std::int64_t, 4> x{}, weight{}, y{};      // their channels tell of groups
  std::array<std::int64_t, 2> stride{}, padding{}, dilation{};
  bool tf32 = false;  // f32 may be rounded to TF32

  auto operator<=>(const ConvShape&) const = default;
};

inline constexpr std::int64_t kConvAlignment = 16;  // of images and weight, in bytes

/// By which the graph's tensors are told apart: x, weight and y.
inline constexpr std::array<std::int64_t, 3> kConvTensors{'x', 'w', 'y'};

OperationGraph conv_graph(const Queue& queue, const CudnnHandle& handle, const ConvShape& shape);

}  // namespace cairn::kernels::cuda
