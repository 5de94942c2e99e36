// imagenet's nets against torchvision's logits (tests/golden/make_resnet.py), with weights out of a
// file with torchvision's names.
#include <cmath>

#include "11_imagenet/resnet.h"
#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/safetensors.h"
#include "support/golden.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

/// value() of make_resnet.py.
Tensor numbered_values(std::uint64_t number, const Shape& shape, const std::string& name) {
  const bool kernel = shape.dims() == 4 || name == "fc.weight";
  const bool positive = !kernel && (name.ends_with(".weight") || name.ends_with("running_var"));
  const double inputs = static_cast<double>(shape.numel()) / static_cast<double>(shape[0]);
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t bits = ((i * 2654435761u + number * 97531u + 12345u) & 0xffffffffu) >> 8;
    const double u = static_cast<double>(bits) / 0x1p24;
    if (name == "images") {
      values[i] = 4 * u - 2;
    } else if (kernel) {
      values[i] = (2 * u - 1) * std::sqrt(6 / inputs);
    } else {
      values[i] = positive ? 0.5 + u : 0.2 * (2 * u - 1);
    }
  }
  return Tensor::from(values, shape, DType::f32);
}

class ResNets : public testing::TestWithParam<const char*> {};

TEST_P(ResNets, HaveTorchvisionsLogits) {
  const std::string arch = GetParam();
  const Golden golden("resnet");
  NamedTensors weights;
  for (const std::string& entry : golden.names()) {  // in order, as numbered
    if (!entry.starts_with(arch + "/")) continue;
    const std::string name = entry.substr(arch.size() + 1);
    const std::vector<double>& sizes = golden.values(entry);
    weights.push_back(
        {name, numbered_values(weights.size(), Shape(sizes.begin(), sizes.end()), name)});
  }
  const TemporaryFolder folder;
  const std::string path = (folder / "weights.safetensors").string();
  checkpointing::write_safetensors(path, weights);
  imagenet::ResNet model(arch, 10);
  checkpointing::load(model, path);
  model.eval();
  const autograd::NoGradGuard plain;
  const std::vector<double> ours =
                                model(numbered_values(1000, {2, 3, 64, 64}, "images")).to_vector(),
                            theirs = golden.values(arch + ".logits");
  ASSERT_EQ(ours.size(), theirs.size());
  double largest = 0;
  for (const double logit : theirs) largest = std::max(largest, std::abs(logit));
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_NEAR(ours[i], theirs[i], 1e-5 * largest) << i;
}

INSTANTIATE_TEST_SUITE_P(Imagenet, ResNets, testing::Values("resnet18", "resnet50"),
                         [](const auto& arch) { return arch.param; });

}  // namespace
}  // namespace cairn::test
