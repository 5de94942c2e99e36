#include "data_parallel/replicas.h"

#include <algorithm>
#include <utility>

#include "cairn/autograd/function.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/norm.h"

namespace cairn::parallel {
namespace {

using autograd::Context;
using autograd::GradTarget;
using autograd::Tensors;

/// Makes a replica's parameter the result of an operation on the model's: the same tensor, so that
/// every handle inside the replica leads to the model's parameter.
struct Replicate {
  static constexpr autograd::OpInfo kInfo{"replicate"};
  Tensor replica;  // until forward: a node that kept its own result would never end

  Tensor forward(Context&, const Tensor&) { return std::exchange(replica, Tensor()); }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const GradTarget target = ctx.grad_target(0);
    if (!target.accumulate) {
      kernels::copy(dy, target.tensor);
      return {target.tensor};
    }
    const Tensor here = Tensor::empty(dy.shape(), dy.dtype(), target.tensor.device());
    kernels::copy(dy, here);
    kernels::axpby(1.0, here, 1.0, target.tensor);
    return {target.tensor};
  }
};

void check_devices(const std::vector<Device>& devices) {
  for (auto device = devices.begin(); device != devices.end(); ++device) {
    core::check_exists(*device);
    CAIRN_CHECK(std::find(devices.begin(), device, *device) == device, "data_parallel",
                "expected different devices, got ", *device, " twice");
  }
}

void check_norms(nn::Module& model) {
  for (const auto& [name, module] : model.modules()) {
    const auto* norm = dynamic_cast<const nn::BatchNorm*>(module);
    if (norm == nullptr || !norm->has_training_function()) continue;
    core::fail<core::Unsupported>(
        "data_parallel", "expected batch norms over their own device's samples, got '", name,
        "', which is synchronised over ranks (DistributedDataParallel, with a process a device)");
  }
}

}  // namespace

Replicas::Replicas(nn::Module& model, std::vector<Device> devices)
    : model_(&model), devices_(std::move(devices)) {
  CAIRN_CHECK(!devices_.empty(), "data_parallel", "expected at least one device, got none");
  check_devices(devices_);
  check_model();
  const auto pairs = [](const NamedTensors& originals, const NamedTensors& copies) {
    std::vector<Copy> all;
    for (std::size_t i = 0; i < originals.size(); ++i) {
      all.push_back({originals[i].tensor, copies[i].tensor});
    }
    return all;
  };
  for (std::size_t i = 1; i < devices_.size(); ++i) {
    Replica replica{model.clone(devices_[i]), {}, {}};
    replica.parameters = pairs(model.parameters(), replica.module->parameters());
    replica.buffers = pairs(model.buffers(), replica.module->buffers());
    replicas_.push_back(std::move(replica));
  }
}

void Replicas::check_model() const {
  if (devices_.size() > 1) check_norms(*model_);
  for (const NamedTensors& list : {model_->parameters(), model_->buffers()}) {
    for (const auto& [name, tensor] : list) {
      CAIRN_CHECK(tensor.device() == devices_[0], "data_parallel", "expected the model on ",
                  devices_[0], ", the first device, got '", name, "' on ", tensor.device(),
                  " (model.to(device))");
    }
  }
}

bool Replicas::Copy::is_current() const {
  return storage.lock() == original.storage() &&
         original_version == original.storage()->version() &&
         copy_version == copy.storage()->version();
}

void Replicas::Copy::update() {
  if (is_current()) return;
  if (copy.dtype() != original.dtype()) {
    const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
    copy.set_data(
        Tensor::empty_strided(copy.shape(), copy.strides(), original.dtype(), copy.device()));
  }
  kernels::copy(original, copy);
  storage = original.storage();
  original_version = original.storage()->version();
  copy_version = copy.storage()->version();
}

void Replicas::connect(const Copy& parameter) {
  Tensor copy = parameter.copy;
  copy.attachments().graph = nullptr;  // of the last forward
  copy.set_requires_grad(false);
  if (parameter.original.requires_grad() && autograd::grad_enabled()) {
    autograd::apply(Replicate{copy}, parameter.original);
  }
}

// The engine runs ready nodes newest first: those of the replicas' forwards, which come later, and
// then these. So device 1 is connected last and its gradient is added first.
void Replicas::follow_model(std::size_t count) {
  check_model();
  for (std::size_t i = count; i-- > 1;) {
    Replica& replica = replicas_[i - 1];
    replica.module->follow(*model_);
    for (Copy& buffer : replica.buffers) buffer.update();
    for (Copy& parameter : replica.parameters) {
      parameter.update();
      connect(parameter);
    }
  }
}

}  // namespace cairn::parallel
