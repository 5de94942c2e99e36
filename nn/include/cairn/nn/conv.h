// Convolutions of images [N, C, H, W] (channels-last in storage, see cairn/autograd/ops.h), of
// sequences [N, C, L] and of volumes [N, C, D, H, W].
#pragma once

#include "cairn/kernels/conv.h"
#include "cairn/nn/module.h"
#include "cairn/nn/size2.h"
#include "cairn/nn/size3.h"

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

struct Conv1dOptions {
  std::int64_t stride = 1, padding = 0, dilation = 1, groups = 1;
  bool bias = true;
};

/// x [N, I, L], weight [O, I / groups, k], bias [O], which start as Conv2d's.
class Conv1d : public Module {
 public:
  Conv1d(std::int64_t in, std::int64_t out, std::int64_t kernel, const Conv1dOptions& options = {});

  std::string kind() const override { return "Conv1d"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t in_;
  Conv1dOptions options_;
  Tensor weight_, bias_;
};

struct Conv3dOptions {
  Size3 stride = 1;
  Size3 padding = 0;
  Size3 dilation = 1;
  std::int64_t groups = 1;
  bool bias = true;
};

/// x [N, I, D, H, W], weight [O, I / groups, kD, kH, kW], bias [O], which start as Conv2d's.
class Conv3d : public Module {
 public:
  Conv3d(std::int64_t in, std::int64_t out, Size3 kernel, const Conv3dOptions& options = {});

  std::string kind() const override { return "Conv3d"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t in_;
  Size3 kernel_;
  Conv3dOptions options_;
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
