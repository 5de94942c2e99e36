// The one place that knows which oneDNN this is: 2.x builds a primitive descriptor from an
// operation descriptor, 3.x from its arguments.
#pragma once

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

namespace cairn::kernels::onednn {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;

/// Dilation as oneDNN counts it: 0 is dense. Padding is the same on both sides.
struct ConvGeometry {
  Dims stride, dilation, padding;
};

inline constexpr auto kConvAlgorithm = dnnl::algorithm::convolution_direct;

#if DNNL_VERSION_MAJOR >= 3

/// Calls f with 64-bit words that tell layouts apart.
template <class F>
void for_each_word(const Desc& desc, const F& f) {
  for (const std::uint8_t byte : desc.get_blob()) f(byte);
}
inline bool has_f16_products() {
  const auto effective = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto wanted = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_fp16);
  return (effective & wanted) == wanted;
}
inline void append_activation(dnnl::post_ops& ops, dnnl::algorithm activation, float alpha = 0.0f) {
  ops.append_eltwise(activation, alpha, 0.0f);
}
inline dnnl::matmul::primitive_desc matmul_desc(const Desc& a, const Desc& b, const Desc* bias,
                                                const Desc& y, const dnnl::primitive_attr& attr,
                                                const dnnl::engine& engine) {
  if (bias == nullptr) return {engine, a, b, y, attr};
  return {engine, a, b, *bias, y, attr};
}
inline dnnl::convolution_forward::primitive_desc conv_forward_desc(
    const Desc& x, const Desc& weight, const Desc* bias, const Desc& y, const ConvGeometry& g,
    const dnnl::primitive_attr& attr, const dnnl::engine& engine) {
  constexpr auto kind = dnnl::prop_kind::forward_training;
  if (bias == nullptr) {
    return {engine,   kind,       kConvAlgorithm, x,         weight, y,
            g.stride, g.dilation, g.padding,      g.padding, attr};
  }
  return {engine, kind,     kConvAlgorithm, x,         weight,    *bias,
          y,      g.stride, g.dilation,     g.padding, g.padding, attr};
}
inline dnnl::convolution_backward_data::primitive_desc conv_backward_data_desc(
    const Desc& dx, const Desc& weight, const Desc& dy, const ConvGeometry& g,
    const dnnl::primitive_attr& attr, const dnnl::engine& engine,
    const dnnl::convolution_forward::primitive_desc& forward) {
  return {engine,     kConvAlgorithm, dx,        weight,  dy,  g.stride,
          g.dilation, g.padding,      g.padding, forward, attr};
}
inline dnnl::convolution_backward_weights::primitive_desc conv_backward_weights_desc(
    const Desc& x, const Desc& dweight, const Desc* dbias, const Desc& dy, const ConvGeometry& g,
    const dnnl::primitive_attr& attr, const dnnl::engine& engine,
    const dnnl::convolution_forward::primitive_desc& forward) {
  if (dbias == nullptr) {
    return {engine,     kConvAlgorithm, x,         dweight, dy,  g.stride,
            g.dilation, g.padding,      g.padding, forward, attr};
  }
  return {engine,   kConvAlgorithm, x,         dweight,   *dbias,  dy,
          g.stride, g.dilation,     g.padding, g.padding, forward, attr};
}

#else

/// Calls f with 64-bit words that tell layouts apart.
template <class F>
void for_each_word(const Desc& desc, const F& f) {
  const dnnl_memory_desc_t& d = desc.data;
  f(d.ndims), f(d.data_type), f(d.offset0), f(d.format_kind),
      f(static_cast<std::int64_t>(d.extra.flags));
  for (int i = 0; i < d.ndims; ++i) f(d.dims[i]), f(d.padded_dims[i]);
  if (d.format_kind != dnnl_blocked) return;
  const dnnl_blocking_desc_t& blocking = d.format_desc.blocking;
  for (int i = 0; i < d.ndims; ++i) f(blocking.strides[i]);
  for (int i = 0; i < blocking.inner_nblks; ++i)
    f(blocking.inner_blks[i]), f(blocking.inner_idxs[i]);
}
inline bool has_f16_products() {
  return false;
}

inline void append_activation(dnnl::post_ops& ops, dnnl::algorithm activation, float alpha = 0.0f) {
  ops.append_eltwise(1.0f, activation, alpha, 0.0f);
}
inline dnnl::matmul::primitive_desc matmul_desc(const Desc& a, const Desc& b, const Desc* bias,
                                                const Desc& y, const dnnl::primitive_attr& attr,
                                                const dnnl::engine& engine) {
  if (bias == nullptr) return {dnnl::matmul::desc(a, b, y), attr, engine};
  return {dnnl::matmul::desc(a, b, *bias, y), attr, engine};
}
inline dnnl::convolution_forward::primitive_desc conv_forward_desc(
    const Desc& x, const Desc& weight, const Desc* bias, const Desc& y, const ConvGeometry& g,
    const dnnl::primitive_attr& attr, const dnnl::engine& engine) {
  using Op = dnnl::convolution_forward::desc;
  constexpr auto kind = dnnl::prop_kind::forward_training;
  if (bias == nullptr) {
    return {Op(kind, kConvAlgorithm, x, weight, y, g.stride, g.dilation, g.padding, g.padding),
            attr, engine};
  }
  return {Op(kind, kConvAlgorithm, x, weight, *bias, y, g.stride, g.dilation, g.padding, g.padding),
          attr, engine};
}
inline dnnl::convolution_backward_data::primitive_desc conv_backward_data_desc(
    const Desc& dx, const Desc& weight, const Desc& dy, const ConvGeometry& g,
    const dnnl::primitive_attr& attr, const dnnl::engine& engine,
    const dnnl::convolution_forward::primitive_desc& forward) {
  using Op = dnnl::convolution_backward_data::desc;
  return {Op(kConvAlgorithm, dx, weight, dy, g.stride, g.dilation, g.padding, g.padding), attr,
          engine, forward};
}
inline dnnl::convolution_backward_weights::primitive_desc conv_backward_weights_desc(
    const Desc& x, const Desc& dweight, const Desc* dbias, const Desc& dy, const ConvGeometry& g,
    const dnnl::primitive_attr& attr, const dnnl::engine& engine,
    const dnnl::convolution_forward::primitive_desc& forward) {
  using Op = dnnl::convolution_backward_weights::desc;
  if (dbias == nullptr) {
    return {Op(kConvAlgorithm, x, dweight, dy, g.stride, g.dilation, g.padding, g.padding), attr,
            engine, forward};
  }
  return {Op(kConvAlgorithm, x, dweight, *dbias, dy, g.stride, g.dilation, g.padding, g.padding),
          attr, engine, forward};
}

#endif

}  // namespace cairn::kernels::onednn
