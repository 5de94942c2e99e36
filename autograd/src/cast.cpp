#include "cast.h"

#include "cairn/autograd/ops.h"
#include "cairn/autograd/saved_tensor.h"
#include "cast_cache.h"
#include "local.h"

namespace cairn::autograd {

namespace {

struct Cast {
  static constexpr OpInfo kInfo{"cast", CastPolicy::keep};
  DType dtype;

  Tensor forward(Context&, const Tensor& x) {
    const core::TensorView view = x.view();
    const Strides strides = view.is_dense() ? view.strides : core::contiguous_strides(view.shape);
    Tensor y = Tensor::empty_strided(view.shape, strides, dtype, view.device);
    kernels::copy(view, y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const GradTarget target = ctx.grad_target(0);
    if (target.accumulate) {
      kernels::axpby(1.0, dy, 1.0, target.tensor);
    } else {
      kernels::copy(dy, target.tensor);
    }
    return {target.tensor};
  }
};

Tensor cached_cast(const Tensor& x, DType dtype) {
  const Local& here = local();
  const std::shared_ptr<CastCache> cache = here.autocast.cache;
  if (!cache || !is_parameter(x)) return cast(x, dtype);
  Tensor copy = cache->find(x, dtype, here.grad_enabled);
  if (copy.defined()) return copy;
  copy = cast(x, dtype);
  cache->insert(x, dtype, here.grad_enabled, copy);
  return copy;
}

DType widest(std::span<Tensor> inputs) {
  DType dtype = inputs[0].dtype();
  for (const Tensor& x : inputs) {
    if (x.defined()) dtype = core::promote(dtype, x.dtype());
  }
  return dtype;
}

// The dtype that the policy wants for x; its own where the policy leaves it alone.
DType wanted(CastPolicy policy, const AutocastState& autocast, DType dtype) {
  if (!autocast.enabled || !core::is_floating(dtype) || dtype == DType::f64) return dtype;
  if (policy == CastPolicy::half) return autocast.dtype;
  if (policy == CastPolicy::f32) return DType::f32;
  return dtype;
}

}  // namespace

Tensor cast(const Tensor& x, DType dtype) {
  return x.dtype() == dtype ? x : apply(Cast{dtype}, x);
}

Tensor to(const Tensor& x, DType dtype) {
  return cast(x, dtype);
}

void cast_inputs(const OpInfo& info, std::span<Tensor> inputs, OpEvent& event) {
  if (info.policy == CastPolicy::keep) return;
  const AutocastState& autocast = local().autocast;
  const bool promote = info.policy == CastPolicy::promote;
  if (!promote && !autocast.enabled) return;
  const DType common = promote ? widest(inputs) : DType::f32;
  for (Tensor& x : inputs) {
    if (!x.defined()) continue;
    const DType dtype = promote ? common : wanted(info.policy, autocast, x.dtype());
    if (dtype == x.dtype()) continue;
    x = info.policy == CastPolicy::half ? cached_cast(x, dtype) : cast(x, dtype);
    ++event.casts;
    event.bytes_cast += static_cast<std::int64_t>(x.nbytes());
  }
}

}  // namespace cairn::autograd
