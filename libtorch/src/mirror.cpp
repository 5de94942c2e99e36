#include "mirror.h"

#include <torch/nn/modules/batchnorm.h>

#include <memory>

#include "cairn/libtorch/sync_batch_norm.h"
#include "cairn/libtorch/tensors.h"

namespace cairn::libtorch {

namespace {

bool is_batch_norm_of_torch(const torch::nn::Module& module) {
  return module.as<torch::nn::BatchNorm1d>() != nullptr ||
         module.as<torch::nn::BatchNorm2d>() != nullptr ||
         module.as<torch::nn::BatchNorm3d>() != nullptr;
}

Tensor known_or_new(const torch::Tensor& theirs, KnownTensors& known) {
  Tensor& ours = known[theirs.unsafeGetTensorImpl()];
  if (!ours.defined()) ours = to_cairn(theirs);
  return ours;
}

}  // namespace

Mirror::Mirror(const torch::nn::Module& module, KnownTensors& known)
    : kind_(module.name()),
      is_batch_norm_(is_batch_norm_of_torch(module) || module.as<SyncBatchNorm>() != nullptr),
      is_ours_(module.as<SyncBatchNorm>() != nullptr) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    Tensor ours = known_or_new(parameter.value(), known);
    const std::string name = ours.name();
    add_parameter(parameter.key(), ours);
    ours.set_requires_grad(parameter.value().requires_grad());
    if (!name.empty()) ours.set_name(name);
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    add_buffer(buffer.key(), known_or_new(buffer.value(), known));
  }
  for (const auto& child : module.named_children()) {
    add_child(child.key(), std::make_shared<Mirror>(*child.value(), known));
  }
}

void Mirror::keep_statistics(bool value) {
  for (const auto& [name, module] : modules()) {
    auto& mirror = static_cast<Mirror&>(*module);
    mirror.keeps_statistics_ = value || mirror.is_ours_;
  }
}

}  // namespace cairn::libtorch
