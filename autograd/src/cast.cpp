#include "cast.h"

#include "cairn/autograd/autocast.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/saved_tensor.h"
#include "cast_cache.h"
#include "local.h"

namespace cairn::autograd {

namespace {

struct Cast {
  static constexpr OpInfo kInfo{.name = "cast", .converts = true};
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

DType widest(std::span<Tensor> inputs) {
  DType dtype = inputs[0].dtype();
  for (const Tensor& x : inputs) {
    if (x.defined()) dtype = core::promote(dtype, x.dtype());
  }
  return dtype;
}

void convert(Tensor& x, DType dtype, bool cached, OpEvent* event) {
  if (dtype == x.dtype()) return;
  bool hit = false;
  x = cached ? cached_cast(x, dtype, &hit) : cast(x, dtype);
  if (event == nullptr) return;
  event->casts += hit ? 0 : 1;
  event->cache_hits += hit ? 1 : 0;
  event->bytes_cast += hit ? 0 : static_cast<std::int64_t>(x.nbytes());
}

bool adjustable(const Tensor& x) {
  return x.defined() && core::is_floating(x.dtype()) && x.dtype() != DType::f64;
}

void convert_all(std::span<Tensor> inputs, DType dtype, OpEvent* event) {
  const bool cached = core::is_half(dtype);
  for (Tensor& x : inputs) {
    if (adjustable(x)) convert(x, dtype, cached, event);
  }
}

void promote_all(std::span<Tensor> inputs, OpEvent* event) {
  const DType common = widest(inputs);
  for (Tensor& x : inputs) {
    if (x.defined()) convert(x, common, false, event);
  }
}

void refuse_half(const OpInfo& info, std::span<Tensor> inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !core::is_half(inputs[i].dtype())) continue;
    core::fail<core::Unsupported>(
        info.name, "expected f32 inputs in an autocast region, got ", inputs[i].dtype(),
        " as input ", i, " (", *info.advice != 0 ? info.advice : "half is not safe here",
        "; CastPolicyGuard({{\"", info.name, "\", CastPolicy::f32}}) runs it in f32)");
  }
}

// The policy that applies here.
CastPolicy resolve(const OpInfo& info, const AutocastState& autocast, OpEvent* event) {
  std::optional<CastPolicy> override;
  if (autocast.enabled && autocast.policies) override = autocast.policies->find(info.name);
  if (event != nullptr) {
    event->policy = override.value_or(info.policy);
    event->overridden = override.has_value();
    event->autocast = autocast.enabled;
  }
  return override.value_or(info.policy);
}

}  // namespace

Tensor cast(const Tensor& x, DType dtype) {
  return x.dtype() == dtype ? x : apply(Cast{dtype}, x);
}

Tensor to(const Tensor& x, DType dtype) {
  return cast(x, dtype);
}

Tensor cached_cast(const Tensor& x, DType dtype, bool* hit) {
  const Local& here = local();
  const std::shared_ptr<CastCache> cache = here.autocast.cache;
  if (!cache || !is_parameter(x)) return cast(x, dtype);
  Tensor copy = cache->find(x, dtype, here.grad_enabled);
  if (hit != nullptr) *hit = copy.defined();
  if (copy.defined()) return copy;
  copy = cast(x, dtype);
  cache->insert(x, dtype, here.grad_enabled, copy);
  return copy;
}

void cast_inputs(const OpInfo& info, std::span<Tensor> inputs, OpEvent* event) {
  const AutocastState& autocast = local().autocast;
  const CastPolicy policy = resolve(info, autocast, event);
  if (autocast.enabled) {
    if (policy == CastPolicy::half) convert_all(inputs, autocast.dtype, event);
    if (policy == CastPolicy::f32) convert_all(inputs, DType::f32, event);
    if (policy == CastPolicy::banned) refuse_half(info, inputs);
  }
  const bool promotes = policy == CastPolicy::promote || info.policy == CastPolicy::promote;
  if (promotes) promote_all(inputs, event);
}

}  // namespace cairn::autograd
