#include "cairn/nn/init.h"

#include <cmath>
#include <string>
#include <vector>

#include "cairn/core/deferred.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/deferred_init.h"

namespace cairn::nn::init {

namespace {

/// draw(generator, host) makes the values in an f32 tensor of the host. `what` names them, but for
/// where the generator stands.
template <class Draw>
void draw_into(const Tensor& x, const std::string& what, Draw draw) {
  const auto fill = [draw](Generator& generator, const Tensor& to) {
    const Tensor host = Tensor::empty(to.shape(), DType::f32, Device{});
    draw(generator, host);
    kernels::copy(host, to);
  };
  Generator& current = Generator::current();
  if (!DeferredInit::active() || !core::can_defer(x)) return fill(current, x);
  const Generator before = current;
  (void)current.next();  // one operation, as the draw is
  core::defer(x, {[fill, before](const Tensor& to) {
                    Generator own = before;
                    fill(own, to);
                  },
                  core::str(what, " from seed ", before.seed(), ", offset ", before.offset())});
}

}  // namespace

void constant(const Tensor& x, double value) {
  if (!DeferredInit::active() || !core::can_defer(x)) return kernels::fill(x, value);
  core::defer(x,
              {[value](const Tensor& to) { kernels::fill(to, value); }, core::str("all ", value)});
}
void uniform(const Tensor& x, double low, double high) {
  draw_into(
      x, core::str("uniform in ", low, " to ", high),
      [=](Generator& generator, const Tensor& host) { generator.fill_uniform(host, low, high); });
}
void normal(const Tensor& x, double mean, double stddev) {
  draw_into(
      x, core::str("normal around ", mean, " with deviation ", stddev),
      [=](Generator& generator, const Tensor& host) { generator.fill_normal(host, mean, stddev); });
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

void kaiming_normal(const Tensor& weight, double gain) {
  const std::int64_t fan = fan_in(weight.shape());
  if (fan > 0) normal(weight, 0.0, gain / std::sqrt(static_cast<double>(fan)));
}

namespace {

// Gram-Schmidt, twice over for the digits, on the vectors x[i * step + j * stride], j = 0 .. length
// - 1.
void make_orthonormal(std::vector<double>& x, std::int64_t count, std::int64_t length,
                      std::int64_t step, std::int64_t stride) {
  const auto at = [&](std::int64_t i, std::int64_t j) -> double& {
    return x[static_cast<std::size_t>(i * step + j * stride)];
  };
  const auto product = [&](std::int64_t a, std::int64_t b) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < length; ++j) sum += at(a, j) * at(b, j);
    return sum;
  };
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t k = 0; k < 2 * i; ++k) {
      const double share = product(i, k % i);
      for (std::int64_t j = 0; j < length; ++j) at(i, j) -= share * at(k % i, j);
    }
    const double norm = std::sqrt(product(i, i));
    for (std::int64_t j = 0; j < length; ++j) at(i, j) /= norm;
  }
}

}  // namespace

void orthogonal(const Tensor& weight, double gain) {
  const std::int64_t columns = fan_in(weight.shape());
  if (weight.numel() == 0) return;
  const std::int64_t rows = weight.size(0);
  draw_into(weight, core::str("orthogonal times ", gain),
            [=](Generator& generator, const Tensor& host) {
              const Tensor drawn = Tensor::empty({rows, columns}, DType::f32, Device{});
              generator.fill_normal(drawn, 0.0, 1.0);
              std::vector<double> values = drawn.to_vector();
              if (rows <= columns) {
                make_orthonormal(values, rows, columns, columns, 1);
              } else {
                make_orthonormal(values, columns, rows, 1, columns);
              }
              for (double& value : values) value *= gain;
              kernels::copy(Tensor::from(values, host.shape(), DType::f32, Device{}), host);
            });
}

void xavier_uniform(const Tensor& weight) {
  const std::int64_t in = fan_in(weight.shape());
  if (weight.numel() == 0) return;
  const std::int64_t out = weight.numel() / weight.size(1);
  const double bound = std::sqrt(6.0 / static_cast<double>(in + out));
  uniform(weight, -bound, bound);
}

}  // namespace cairn::nn::init
