// Convolutions of images [N, C, H, W] (channels-last in storage, see cairn/autograd/ops.h).
#pragma once

#include "cairn/kernels/conv.h"
#include "cairn/nn/module.h"
#include "cairn/nn/size2.h"

namespace cairn::nn {

struct Conv2dOptions {
  Size2 stride = 1;
  Size2 padding = 0;
  Size2 dilation = 1;
  std::int64_t groups = 1;
  bool bias = true;
};

/// x [N, I, H, W], weight [O, I / groups, kH, kW], bias [O]. Weight and bias start uniform in
/// +-1 / sqrt(I / groups kH kW).
class Conv2d : public Module {
 public:
  Conv2d(std::int64_t in, std::int64_t out, Size2 kernel, const Conv2dOptions& options = {});

  std::string kind() const override { return "Conv2d"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t in_;
  Size2 kernel_;
  Conv2dOptions options_;
  Tensor weight_, bias_;
};

struct ConvTranspose2dOptions {
  Size2 stride = 1;
  Size2 padding = 0;
  Size2 output_padding = 0;
  Size2 dilation = 1;
  std::int64_t groups = 1;
  bool bias = true;
};

/// x [N, I, H, W], weight [I, O / groups, kH, kW], bias [O]. Weight and bias start uniform in
/// +-1 / sqrt(O / groups kH kW), as in PyTorch.
class ConvTranspose2d : public Module {
 public:
  ConvTranspose2d(std::int64_t in, std::int64_t out, Size2 kernel,
                  const ConvTranspose2dOptions& options = {});

  std::string kind() const override { return "ConvTranspose2d"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t out_;
  Size2 kernel_;
  ConvTranspose2dOptions options_;
  Tensor weight_, bias_;
};

}  // namespace cairn::nn
