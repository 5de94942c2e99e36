// A convolution as cuDNN sees it: descriptors and the algorithms found for one shape, made once and
// kept (conv_plan_for).
#pragma once

#include <cudnn.h>

#include <array>
#include <memory>
#include <vector>

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
  bool tf32 = false;  // f32 may be rounded to TF32

  auto operator<=>(const ConvShape&) const = default;
};

struct DestroyConvolution {
  void operator()(cudnnConvolutionDescriptor_t convolution) const {
    cudnnDestroyConvolutionDescriptor(convolution);
  }
};

/// A deterministic algorithm, with a descriptor of its own: the math type is part of that.
struct ConvAlgorithm {
  std::unique_ptr<cudnnConvolutionStruct, DestroyConvolution> convolution;
  int number = 0;  // of the pass's own enumeration
  std::size_t workspace = 0;
};

struct ConvPlan {
  ConvPlan();
  ~ConvPlan();
  ConvPlan(const ConvPlan&) = delete;
  ConvPlan& operator=(const ConvPlan&) = delete;

  cudnnTensorDescriptor_t x = nullptr, y = nullptr;
  cudnnFilterDescriptor_t weight = nullptr;
  std::vector<ConvAlgorithm> algorithms;  // the fastest first; one may still refuse to run
};

/// A plan without algorithms where cuDNN has no deterministic one for the shape.
std::shared_ptr<const ConvPlan> conv_plan_for(const Queue& queue, const ConvShape& shape);

/// How many images cuDNN takes at once, given its limit on a tensor's elements. Throws Unsupported
/// where one image or the weight is past it.
std::int64_t images_at_once(const char* op, const Shape& x, const Shape& weight, const Shape& y);

}  // namespace cairn::kernels::cuda
