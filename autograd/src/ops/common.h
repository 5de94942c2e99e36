// What many operations share.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "cairn/autograd/function.h"
#include "cairn/autograd/ops.h"
#include "cairn/kernels/elementwise.h"
#include "cast.h"

namespace cairn::autograd {

/// Uninitialised, dense, on x's device.
inline Tensor empty_as(const Tensor& x, const Shape& shape, DType dtype) {
  return Tensor::empty(shape, dtype, x.device());
}

/// Of statistics and losses: f32, or f64 for f64.
inline DType wide(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

inline TensorView view_or_none(const Tensor& x) {
  return x.defined() ? x.view() : TensorView();
}

/// Throws InvalidArgument for the mean over no sample at all, which would be NaN.
void check_mean(const char* op, Reduction reduction, std::int64_t samples, const Shape& shape);

/// A scalar: the sum or mean of all losses.
Tensor total(kernels::ReductionKind op, const Tensor& losses);

/// Uninitialised, of x's dtype and layout, with another shape of 4 dimensions: channels-last where
/// x is.
Tensor empty_image(const Tensor& x, const Shape& shape);

/// A gradient of x's layout: dy itself where nobody else has it, else a new tensor.
Tensor reuse_or_new(const Tensor& dy, const Tensor& x);

/// x as a matrix of its last dimension: a view, or a copy where memory does not allow one.
Tensor as_matrix(const Tensor& x);

/// x, or a contiguous copy of it.
Tensor contiguous_data(const Tensor& x);

/// dims wrapped and sorted; all of them where none are given. Throws for repeated ones.
std::vector<int> wrap_dims(const std::vector<int>& dims, int count, const char* op);
/// The shape with those dimensions of size 1.
Shape reduced_shape(const Shape& shape, const std::vector<int>& dims);

/// dy summed over the dimensions that broadcasting gave the input: dy itself where there are none,
/// else the sum where the input's gradient goes.
Tensor sum_to_input(Context& ctx, int input, const Tensor& dy);

/// Writes, or adds, a finished gradient where the input's gradient goes: for values that a kernel
/// cannot accumulate. Returns dy where that is as good.
Tensor land(const GradTarget& target, const Tensor& dy);
inline Tensor land(Context& ctx, int input, const Tensor& dy) {
  return land(ctx.grad_target(input), dy);
}

namespace detail {
template <const OpInfo& info>
inline const bool kRegisteredComposition = register_operation(info);  // before main
}

/// An operation made of others, f(inputs...): autocast casts its inputs by its own name and policy,
/// and those inside take what they get.
template <const OpInfo& info, class F, class... Inputs>
Tensor composed(const F& f, const Inputs&... inputs) {
  [[maybe_unused]] static constexpr const bool* registered = &detail::kRegisteredComposition<info>;
  std::array<Tensor, sizeof...(Inputs)> list{inputs...};
  cast_inputs(info, list, nullptr);
  const AutocastGuard inside(false, DType::f16, /*cache=*/false);
  return std::apply(f, list);
}

}  // namespace cairn::autograd
