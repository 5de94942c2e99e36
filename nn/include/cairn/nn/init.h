// Initialisation: fills a floating tensor in place with numbers drawn from
// core::Generator::current(), on any device and in any dtype (drawn in f32 in row-major order, so
// the same seed gives the same values everywhere).
#pragma once

#include <cstdint>

#include "cairn/core/tensor.h"

namespace cairn::nn::init {

void constant(const Tensor& x, double value);
void uniform(const Tensor& x, double low, double high);
void normal(const Tensor& x, double mean = 0.0, double stddev = 1.0);

/// The fan-in of a weight [O, I, ...] is I times the elements of a pair of channels, its fan-out O
/// times those. Throws InvalidArgument for fewer than 2 dimensions.
std::int64_t fan_in(const Shape& weight);
/// Uniform in +-sqrt(6 / ((1 + a^2) fan_in)) (He et al. 2015). a = sqrt(5), PyTorch's default for
/// layers, gives +-1 / sqrt(fan_in).
void kaiming_uniform(const Tensor& weight, double a);
/// Normal with deviation gain / sqrt(fan_in); sqrt(2), for layers before a ReLU, is PyTorch's
/// default.
void kaiming_normal(const Tensor& weight, double gain = 1.4142135623730951);
/// A matrix [O, I ...] of orthonormal rows, or columns where there are fewer of those, times gain
/// (Saxe et al. 2013): random signs and directions from normal values.
void orthogonal(const Tensor& weight, double gain = 1.0);
/// Uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010).
void xavier_uniform(const Tensor& weight);

}  // namespace cairn::nn::init
