#include <algorithm>
#include <cmath>

#include "cairn/core/generator.h"
#include "cairn/kernels/copy.h"
#include "works.h"

namespace bench {

using namespace cairn;

Tensor random(const Shape& shape, DType dtype) {
  constexpr std::int64_t kDrawn = 1 << 20;
  const std::int64_t n = shape.numel(), block = std::min(n, kDrawn);
  Tensor host = Tensor::empty({block}, DType::f32, Device{});
  Generator(7).fill_normal(host, 0.0, 1.0);
  Tensor drawn = Tensor::empty({block}), x = Tensor::empty(shape, dtype);
  kernels::copy(host, drawn);
  const TensorView flat = x.view().reshape({n});
  for (std::int64_t at = 0; at < n; at += block) {
    const std::int64_t count = std::min(block, n - at);
    kernels::copy(drawn.view().slice(0, 0, count), flat.slice(0, at, at + count));
  }
  return x;
}

Tensor random_channels_last(const Shape& shape, DType dtype) {
  const Strides strides = core::channels_last_strides(shape);
  Tensor x = Tensor::empty_strided(shape, strides, dtype, core::default_device());
  kernels::copy(random(shape, dtype), x);
  return x;
}

Tensor integers(const Shape& shape, std::int64_t below) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i) values.push_back(i * 7919 % below);
  return Tensor::from(values, shape);
}

Run device_copy(double bytes) {
  constexpr std::int64_t kLargest = 1 << 28;
  const auto floats = std::max<std::int64_t>(1, std::llround(bytes / (2 * sizeof(float))));
  const std::int64_t chunk = std::min(floats, kLargest);
  const Tensor from = random({chunk}), to = Tensor::empty_like(from);
  return [=] {
    for (std::int64_t at = 0; at < floats; at += chunk) {
      const std::int64_t count = std::min(chunk, floats - at);
      core::copy_bytes(from.view().slice(0, 0, count), to.view().slice(0, 0, count));
    }
  };
}

}  // namespace bench
