// ResNet-18, -34 and -50 (He et al. 2016) with torchvision's names, so that its published weights
// load: images [N, 3, H, W] to logits [N, classes].
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cairn/nn/nn.h"

namespace imagenet {

class ResNet : public cairn::nn::Module {
 public:
  /// arch: "resnet18", "resnet34" or "resnet50". Throws InvalidArgument for another.
  ResNet(const std::string& arch, std::int64_t classes);
  std::string kind() const override { return "ResNet"; }
  cairn::Tensor forward(const cairn::Tensor& x) override;

 private:
  std::shared_ptr<cairn::nn::Sequential> add_stage(const std::string& name, bool bottleneck,
                                                   std::int64_t blocks, std::int64_t width,
                                                   int stride);
  std::int64_t channels_ = 64;  // that the next block takes
  std::shared_ptr<cairn::nn::Conv2d> conv1_;
  std::shared_ptr<cairn::nn::BatchNorm2d> bn1_;
  std::vector<std::shared_ptr<cairn::nn::Sequential>> stages_;
  std::shared_ptr<cairn::nn::Linear> fc_;
};

}  // namespace imagenet
