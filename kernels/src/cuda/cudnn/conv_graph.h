// A convolution as an operation graph of cuDNN's, a graph of one operation.
#pragma once

#include <array>

#include "cairn/kernels/conv.h"
#include "cuda/contiguous.h"
#include "cuda/cudnn/descriptor.h"

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

/// By which a graph's tensors are told apart, in the order of ConvGraph's pointers.
inline constexpr std::array<std::int64_t, 3> kConvTensors{'x', 'w', 'y'};

/// The graph names the descriptors beside it, so they live as long.
class ConvGraph {
 public:
  ConvGraph(const Queue& queue, const CudnnHandle& handle, const ConvShape& shape);
  const Descriptor& graph() const { return graph_; }
  /// Whether cuDNN knows such a graph at all.
  bool is_supported() const { return supported_; }

 private:
  Descriptor x_, weight_, y_, convolution_, operation_, graph_;
  bool supported_ = false;
};

}  // namespace cairn::kernels::cuda
