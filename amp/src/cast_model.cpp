#include "cast_model.h"

#include <unordered_set>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/deferred.h"
#include "cairn/core/error.h"
#include "cairn/core/gradient_slot.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::amp {

namespace {

constexpr const char* kWrapper = "amp";

using TensorIds = std::unordered_set<const void*>;

void check_f32(const char* kind, const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    CAIRN_CHECK(!core::is_floating(tensor.dtype()) || tensor.dtype() == DType::f32, "initialize",
                "expected an f32 model, got the ", kind, " '", name, "' of ", tensor.dtype(),
                " (cast it first; initialize casts it itself)");
  }
}

/// What stays f32: batch norm's running statistics always, its weight and bias if asked.
TensorIds kept_in_f32(nn::Module& model, bool keep_batchnorm_fp32) {
  TensorIds kept;
  for (const auto& [name, module] : model.modules()) {
    if (!module->is_batch_norm()) continue;
    for (const NamedTensor& buffer : module->buffers()) kept.insert(buffer.tensor.id());
    if (!keep_batchnorm_fp32) continue;
    for (const NamedTensor& parameter : module->parameters()) kept.insert(parameter.tensor.id());
  }
  return kept;
}

/// Points the tensor at its value in another dtype; returns the former one.
Tensor cast_in_place(Tensor tensor, DType dtype) {
  const core::MemoryCategoryGuard category(tensor.storage()->category());
  Tensor former = tensor.detach();
  const Tensor cast =
      former.view().is_dense()
          ? Tensor::empty_strided(former.shape(), former.strides(), dtype, former.device())
          : Tensor::empty(former.shape(), dtype, former.device());
  kernels::copy(former, cast);
  tensor.set_data(cast);
  return former;
}

void cast_to_half(nn::Module& model, const Options& options, const StatesOfParameters& states) {
  const DType half = *options.cast_model_type;
  const TensorIds kept = kept_in_f32(model, *options.keep_batchnorm_fp32);
  for (const auto& [name, tensor] : model.parameters()) {
    if (!core::is_floating(tensor.dtype()) || kept.contains(tensor.id())) continue;
    if (tensor.dtype() == half) continue;  // shared with a model before this one
    const bool deferred = !core::deferred(tensor).empty();
    Tensor exact = cast_in_place(tensor, half);
    const auto found = states.find(tensor.id());
    const optim::StateOptions state = found == states.end() ? optim::StateOptions() : found->second;
    if (*options.master_weights) {
      kernels::MasterWeight::assign(tensor, std::move(exact), state.masters);
    }
    const core::GradientSlot* slot = tensor.gradient_slot_or_null();
    const auto reducer = slot == nullptr ? nullptr : slot->reducer();
    if (deferred && reducer) reducer->weight_arrived(tensor);
    kernels::MasterWeight::keep_in(tensor, state.place());
  }
  for (const auto& [name, tensor] : model.buffers()) {
    if (core::is_floating(tensor.dtype()) && !kept.contains(tensor.id())) {
      cast_in_place(tensor, half);
    }
  }
}

nn::Module::ForwardWrapper forward_wrapper(Options options, std::function<bool()> in_region) {
  options.world = {};  // which need not live as long as the model
  return [o = std::move(options), in_region = std::move(in_region)](
             const Tensor& x, const nn::Module::Forward& next) {
    const auto call = [&] {
      const Region region(o, o.autocast.value_or(false) || in_region());
      return next(o.cast_model_type ? to_floating(x, *o.cast_model_type) : x);
    };
    const Tensor y = call();
    return o.cast_model_outputs ? to_floating(y, *o.cast_model_outputs) : y;
  };
}

}  // namespace

void check_model(const nn::Module& model) {
  CAIRN_CHECK(!model.has_forward_wrapper(kWrapper), "initialize",
              "expected a model that is not initialized, got a ", model.kind(),
              " that is (amp::release(model) gives it back)");
  check_f32("parameter", model.parameters());
  check_f32("buffer", model.buffers());
  for (const auto& [name, tensor] : model.parameters()) {
    const core::GradientSlot* slot = tensor.gradient_slot_or_null();
    CAIRN_CHECK(slot == nullptr || !slot->holds_gradient() || (slot->placed() && !slot->owner()),
                "initialize", "expected a model without gradients, got one in '", name,
                "' (step, or clear_grad(), first)");
  }
}

bool was_moved(const nn::Module& model) {
  return !model.has_forward_wrapper(kWrapper) && model.parameters().empty();
}

Tensor to_floating(const Tensor& x, DType dtype) {
  const bool casts = x.defined() && core::is_floating(x.dtype()) && x.dtype() != dtype;
  return casts ? autograd::to(x, dtype) : x;
}

void widen_parameter(Tensor parameter) {
  if (!core::is_half(parameter.dtype())) return;
  const Tensor exact = kernels::master_value_beside(parameter);
  exact.storage()->set_category(core::MemoryCategory::parameters);
  parameter.set_data(exact);
}

void check_masters_whole(const NamedTensors& parameters, const char* what) {
  for (const auto& [name, tensor] : parameters) {
    const auto* master = kernels::MasterWeight::peek(tensor);
    if (master == nullptr || !master->part()) continue;
    core::fail<core::Unsupported>(what, "expected f32 masters that are whole on this rank, got a ",
                                  "part of that of '", name, "': the optimizer's state is sharded ",
                                  "(save the training state, and resume it without ",
                                  "ShardedDataParallel)");
  }
}

void cast_model(nn::Module& model, const Options& options, const StatesOfParameters& states,
                std::function<bool()> in_region) {
  if (core::is_half(options.cast_model_type.value_or(DType::f32))) {
    cast_to_half(model, options, states);
  }
  model.set_saves_f32(true);
  model.add_forward_wrapper(forward_wrapper(options, std::move(in_region)), kWrapper);
}

void release_model(nn::Module& model) {
  if (!model.has_forward_wrapper(kWrapper)) return;
  model.remove_forward_wrappers(kWrapper);
  model.set_saves_f32(false);
  for (const auto& [name, tensor] : model.parameters()) widen_parameter(tensor);
  for (const auto& [name, tensor] : model.buffers()) {
    if (core::is_half(tensor.dtype())) cast_in_place(tensor, DType::f32);
  }
}

}  // namespace cairn::amp
