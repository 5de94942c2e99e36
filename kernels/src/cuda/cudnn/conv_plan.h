// A convolution as cuDNN sees it: descriptors and the algorithm chosen for one shape, made once and
// kept (conv_plan_for).
#pragma once

#include <cudnn.h>

#include <array>
#include <memory>

#include "cairn/kernels/conv.h"
#include "cuda/contiguous.h"

namespace cairn::kernels::cuda {

enum class ConvPass : std::uint8_t { forward, backward_data, backward_weight };

struct ConvShape {
  int device = 0;
  ConvPass pass = ConvPass::forward;
  DType dtype = DType::f32;
  StorageOrder storage = StorageOrder::channels_last;  // of images and weight alike
  std::array<std::int64_t, 4> x{}, weight{}, y{};
  std::array<std::int64_t, 2> stride{}, padding{}, dilation{};
  std::int64_t groups = 1;

  auto operator<=>(const ConvShape&) const = default;
};

struct ConvPlan {
  ConvPlan();
  ~ConvPlan();
  ConvPlan(const ConvPlan&) = delete;
  ConvPlan& operator=(const ConvPlan&) = delete;

  cudnnTensorDescriptor_t x = nullptr, y = nullptr;
  cudnnFilterDescriptor_t weight = nullptr;
  cudnnConvolutionDescriptor_t convolution = nullptr;
  int algorithm = 0;  // of the pass's own enumeration; deterministic
  std::size_t workspace = 0;
};

/// nullptr where cuDNN has no deterministic algorithm for the shape.
std::shared_ptr<const ConvPlan> conv_plan_for(const Queue& queue, const ConvShape& shape);

}  // namespace cairn::kernels::cuda
