#include "cairn/nn/init.h"

#include <cmath>

#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::nn::init {

namespace {
// Draws into a host tensor and moves the values over.
template <class Draw>
void draw_into(const Tensor& x, Draw draw) {
  const Tensor host = Tensor::empty(x.shape(), DType::f32, Device{});
  draw(host);
  kernels::copy(host, x);
}
}  // namespace

void constant(const Tensor& x, double value) {
  kernels::fill(x, value);
}
void uniform(const Tensor& x, double low, double high) {
  draw_into(x, [&](const Tensor& host) { Generator::current().fill_uniform(host, low, high); });
}
void normal(const Tensor& x, double mean, double stddev) {
  draw_into(x, [&](const Tensor& host) { Generator::current().fill_normal(host, mean, stddev); });
}

std::int64_t fan_in(const Shape& weight) {
  CAIRN_CHECK(weight.dims() >= 2, "init", "expected a weight of at least 2 dimensions, got ",
              weight);
  return Shape(weight.begin() + 1, weight.end()).numel();
}

void kaiming_uniform(const Tensor& weight, double a) {
  const std::int64_t fan = fan_in(weight.shape());
  if (fan == 0) return;
  const double bound = std::sqrt(6.0 / ((1.0 + a * a) * static_cast<double>(fan)));
  uniform(weight, -bound, bound);
}

void xavier_uniform(const Tensor& weight) {
  const std::int64_t in = fan_in(weight.shape());
  if (weight.numel() == 0) return;
  const std::int64_t out = weight.numel() / weight.size(1);
  const double bound = std::sqrt(6.0 / static_cast<double>(in + out));
  uniform(weight, -bound, bound);
}

}  // namespace cairn::nn::init
