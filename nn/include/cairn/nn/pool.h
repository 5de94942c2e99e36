// Pools of images [N, C, H, W], and images of another size.
#pragma once

#include <optional>

#include "cairn/autograd/ops.h"
#include "cairn/kernels/pool.h"
#include "cairn/nn/layer.h"
#include "cairn/nn/module.h"
#include "cairn/nn/size2.h"

namespace cairn::nn {

struct Pool2dOptions {
  std::optional<Size2> stride;  // unset: the kernel's size
  Size2 padding = 0;
};

class MaxPool2d : public Module {
 public:
  explicit MaxPool2d(Size2 kernel, const Pool2dOptions& options = {});
  std::string kind() const override { return "MaxPool2d"; }
  Tensor forward(const Tensor& x) override;

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  Size2 kernel_;
  Pool2dOptions options_;
};

/// Means over windows; padding counts as zeros.
class AvgPool2d : public Module {
 public:
  explicit AvgPool2d(Size2 kernel, const Pool2dOptions& options = {});
  std::string kind() const override { return "AvgPool2d"; }
  Tensor forward(const Tensor& x) override;

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  Size2 kernel_;
  Pool2dOptions options_;
};

/// To images of that size: means, and maxima, of windows that share the image out evenly.
class AdaptiveAvgPool2d : public Layer<AdaptiveAvgPool2d, Size2> {
 public:
  explicit AdaptiveAvgPool2d(Size2 size);
  Tensor forward(const Tensor& x) override;
};
class AdaptiveMaxPool2d : public Layer<AdaptiveMaxPool2d, Size2> {
 public:
  explicit AdaptiveMaxPool2d(Size2 size);
  Tensor forward(const Tensor& x) override;
};

struct UpsampleOptions {
  autograd::ResampleMode mode = autograd::ResampleMode::nearest;
  bool align_corners = false;  // bilinear
};
/// To images `scale` times as high and wide, the sizes rounded down.
class Upsample : public Layer<Upsample, double, UpsampleOptions> {
 public:
  explicit Upsample(double scale, const UpsampleOptions& options = {});
  Tensor forward(const Tensor& x) override;
};

/// [N, C, H, W] -> [N, C].
class GlobalAvgPool2d : public Module {
 public:
  std::string kind() const override { return "GlobalAvgPool2d"; }
  Tensor forward(const Tensor& x) override;

 protected:
  std::shared_ptr<Module> make_like() const override;
};

}  // namespace cairn::nn
