#include "resnet.h"

#include <array>
#include <cmath>

#include "cairn/autograd/ops.h"
#include "cairn/nn/init.h"

namespace imagenet {

using namespace cairn;

namespace {

constexpr std::int64_t kExpansion = 4;  // of a bottleneck

nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t size, int stride = 1) {
  return nn::Conv2d(in, out, size, {.stride = stride, .padding = size / 2, .bias = false});
}

/// Convolutions beside a shortcut: two of 3 x 3, or 1 x 1, 3 x 3 and 1 x 1.
class Block : public nn::Module {
 public:
  Block(bool bottleneck, std::int64_t in, std::int64_t width, int stride) {
    const std::int64_t out = bottleneck ? kExpansion * width : width;
    if (bottleneck) {
      add(in, width, 1, 1, true);
      add(width, width, 3, stride, true);
      add(width, out, 1, 1, false);
    } else {
      add(in, width, 3, stride, true);
      add(width, width, 3, 1, false);
    }
    if (stride == 1 && in == out) return;
    shortcut_ =
        add_module("downsample", nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)));
  }
  std::string kind() const override { return "Block"; }
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (const auto& [conv, norm] : layers_) y = (*norm)((*conv)(y));
    return autograd::add_relu(y, shortcut_ ? (*shortcut_)(x) : x);
  }

 private:
  void add(std::int64_t in, std::int64_t out, std::int64_t size, int stride, bool relu) {
    const std::string number = std::to_string(layers_.size() + 1);
    const auto convolution = add_module("conv" + number, conv(in, out, size, stride));
    layers_.push_back(
        {convolution, add_module("bn" + number, nn::BatchNorm2d(out, {.relu = relu}))});
  }

  struct Layer {
    std::shared_ptr<nn::Conv2d> conv;
    std::shared_ptr<nn::BatchNorm2d> norm;
  };
  std::vector<Layer> layers_;
  std::shared_ptr<nn::Sequential> shortcut_;
};

struct Sizes {
  bool bottleneck;
  std::array<std::int64_t, 4> blocks;
};

Sizes sizes_of(const std::string& arch) {
  if (arch == "resnet18") return {false, {2, 2, 2, 2}};
  if (arch == "resnet34") return {false, {3, 4, 6, 3}};
  if (arch == "resnet50") return {true, {3, 4, 6, 3}};
  core::fail("resnet", "expected resnet18, resnet34 or resnet50, got '", arch, "'");
}

}  // namespace

ResNet::ResNet(const std::string& arch, std::int64_t classes)
    : conv1_(add_module("conv1", nn::Conv2d(3, 64, 7, {.stride = 2, .padding = 3, .bias = false}))),
      bn1_(add_module("bn1", nn::BatchNorm2d(64, {.relu = true}))) {
  const Sizes sizes = sizes_of(arch);
  for (std::size_t i = 0; i < 4; ++i) {
    stages_.push_back(add_stage("layer" + std::to_string(i + 1), sizes.bottleneck, sizes.blocks[i],
                                std::int64_t{64} << i, i == 0 ? 1 : 2));
  }
  fc_ = add_module("fc", nn::Linear(channels_, classes));
  // torchvision's: normal, with the fan-out's deviation.
  for (const auto& [name, parameter] : parameters()) {
    if (parameter.dims() != 4) continue;
    const double fan_out =
        static_cast<double>(parameter.numel()) / static_cast<double>(parameter.size(1));
    nn::init::normal(parameter, 0.0, std::sqrt(2.0 / fan_out));
  }
}

std::shared_ptr<nn::Sequential> ResNet::add_stage(const std::string& name, bool bottleneck,
                                                  std::int64_t blocks, std::int64_t width,
                                                  int stride) {
  nn::Sequential stage;
  for (std::int64_t i = 0; i < blocks; ++i) {
    stage.add(Block(bottleneck, channels_, width, i == 0 ? stride : 1));
    channels_ = bottleneck ? kExpansion * width : width;
  }
  return add_module(name, std::move(stage));
}

Tensor ResNet::forward(const Tensor& x) {
  Tensor y = autograd::max_pool2d((*bn1_)((*conv1_)(x)), {.kernel = {3, 3}, .padding = {1, 1}});
  for (const auto& stage : stages_) y = (*stage)(y);
  return (*fc_)(autograd::global_avg_pool2d(y));
}

}  // namespace imagenet
