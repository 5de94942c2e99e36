// ResNet-18 (He et al. 2016) for images of 32 x 32: a 3 x 3 stem, no pooling before the stages.
// [N, 3, 32, 32] to logits [N, 10].
#pragma once

#include <memory>
#include <vector>

#include "cairn/nn/nn.h"

namespace bench {

/// Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes.
class ResidualBlock : public cairn::nn::Module {
 public:
  ResidualBlock(std::int64_t in, std::int64_t out, int stride);
  std::string kind() const override { return "ResidualBlock"; }
  cairn::Tensor forward(const cairn::Tensor& x) override;

 private:
  std::shared_ptr<cairn::nn::Conv2d> conv1_, conv2_, shortcut_;
  std::shared_ptr<cairn::nn::BatchNorm2d> norm1_, norm2_, shortcut_norm_;
};

class ResNet18 : public cairn::nn::Module {
 public:
  ResNet18();
  std::string kind() const override { return "ResNet18"; }
  cairn::Tensor forward(const cairn::Tensor& x) override;

 private:
  std::shared_ptr<cairn::nn::Conv2d> stem_;
  std::shared_ptr<cairn::nn::BatchNorm2d> norm_;
  std::vector<std::shared_ptr<ResidualBlock>> blocks_;
  std::shared_ptr<cairn::nn::Linear> head_;
};

}  // namespace bench
