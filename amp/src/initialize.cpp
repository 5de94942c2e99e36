#include <unordered_set>

#include "amp_impl.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::amp {

namespace {

using TensorIds = std::unordered_set<const void*>;

void check_f32(const char* kind, const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    CAIRN_CHECK(!core::is_floating(tensor.dtype()) || tensor.dtype() == DType::f32, "initialize",
                "expected an f32 model, got the ", kind, " '", name, "' of ", tensor.dtype(),
                core::is_half(tensor.dtype())
                    ? " (was the model cast or initialized before? initialize casts it itself)"
                    : " (cast it first)");
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

/// Points the tensor at its half value; returns the f32 one.
Tensor cast_to_half(Tensor tensor, DType half) {
  const core::MemoryCategoryGuard category(tensor.storage()->category());
  Tensor exact = tensor.detach();
  const Tensor cast =
      exact.view().is_dense()
          ? Tensor::empty_strided(exact.shape(), exact.strides(), half, exact.device())
          : Tensor::empty(exact.shape(), half, exact.device());
  kernels::copy(exact, cast);
  tensor.set_data(cast);
  return exact;
}

/// The parameter's f32 memory becomes its master's; copied where others use it too.
void set_master(const Tensor& parameter, Tensor exact) {
  if (exact.storage().use_count() > 1) {
    const Tensor shared = exact;
    exact = Tensor::empty_like(shared);
    kernels::copy(shared, exact);
  }
  exact.storage()->set_category(core::MemoryCategory::optimizer_state);
  parameter.meta().master = std::make_shared<Tensor>(std::move(exact));
}

void cast_model(nn::Module& model, const Options& options) {
  const TensorIds kept = kept_in_f32(model, *options.keep_batchnorm_fp32);
  for (const auto& [name, tensor] : model.parameters()) {
    if (!core::is_floating(tensor.dtype()) || kept.contains(tensor.id())) continue;
    Tensor exact = cast_to_half(tensor, options.half_dtype);
    if (*options.master_weights && tensor.requires_grad()) set_master(tensor, std::move(exact));
  }
  for (const auto& [name, tensor] : model.buffers()) {
    if (!core::is_floating(tensor.dtype()) || kept.contains(tensor.id())) continue;
    cast_to_half(tensor, options.half_dtype);
  }
}

Tensor to(const Tensor& x, DType dtype) {
  const bool casts = x.defined() && core::is_floating(x.dtype()) && x.dtype() != dtype;
  return casts ? autograd::to(x, dtype) : x;
}

nn::Module::ForwardWrapper forward_wrapper(const Options& options) {
  using Forward = nn::Module::Forward;
  const DType half = options.half_dtype;
  switch (options.opt_level) {
    case OptLevel::O0:
      return [](const Tensor& x, const Forward& next) { return next(to(x, DType::f32)); };
    case OptLevel::O1:
      return [half](const Tensor& x, const Forward& next) {
        const autograd::AutocastGuard autocast(true, half);
        return next(x);
      };
    case OptLevel::O2:
    case OptLevel::O3:
      return [half](const Tensor& x, const Forward& next) {
        return to(next(to(x, half)), DType::f32);
      };
  }
  core::fail("initialize", "expected O0 to O3, got ", static_cast<int>(options.opt_level));
}

}  // namespace

Amp initialize(nn::Module& model, optim::Optimizer& optimizer, const Options& options) {
  const Options resolved = resolve(options);
  const LossScaler scaler(resolved.scaler);
  check_f32("parameter", model.parameters());
  check_f32("buffer", model.buffers());
  if (resolved.master_weights) {
    cast_model(model, resolved);
    optimizer.set_master_weights(*resolved.master_weights);
    optimizer.refresh();
  }
  model.add_forward_wrapper(forward_wrapper(resolved));
  log::info("amp: {}", describe(resolved));
  return Amp(std::make_shared<Amp::Impl>(Amp::Impl{resolved, &optimizer, scaler}));
}

}  // namespace cairn::amp
