#include "support/machine_share.h"

#include <algorithm>
#include <string_view>

#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/matmul.h"

namespace support {

using namespace cairn;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

constexpr std::int64_t kLargest = 8192;
constexpr double kLongEnough = 5e-3;

/// Seconds of the best of a few products of n x n matrices.
double product_seconds(std::int64_t n, Device device, DType dtype) {
  const Tensor x = Tensor::full({n, n}, 0.5, dtype, device),
               y = Tensor::empty({n, n}, dtype, device);
  const core::Stream stream = core::Stream::current(device);
  double least = 0;
  for (int run = 0; run < 4; ++run) {  // the first makes what later ones find ready
    const auto start = std::chrono::steady_clock::now();
    kernels::matmul(x, x, y);
    stream.synchronize();
    const double seconds = seconds_since(start);
    least = run < 2 ? seconds : std::min(least, seconds);
  }
  return least;
}

/// Operations a second, of products that are large for the device.
double measured_limit(Device device, DType dtype) {
  std::int64_t n = 256;
  double seconds = product_seconds(n, device, dtype);
  while (seconds < kLongEnough && n < kLargest) {
    n *= 2;
    seconds = product_seconds(n, device, dtype);
  }
  const auto size = static_cast<double>(n);
  return 2 * size * size * size / seconds;
}

/// Multiplications and additions; 0: not of these kinds.
double operations_of(const autograd::OpEvent& event) {
  const std::string_view name = event.name;
  const Tensor& y = event.outputs[0];
  const auto results = static_cast<double>(y.numel());
  if (name == "linear" || name == "matmul")
    return 2 * results * static_cast<double>(event.inputs[0].size(-1));
  if (name == "linear_cross_entropy")  // of a weight [classes, features]
    return 2 * static_cast<double>(event.inputs[0].numel() * event.inputs[1].size(0));
  if (name == "conv1d" || name == "conv2d" || name == "conv3d")
    return 2 * results * static_cast<double>(event.inputs[1].numel()) /
           static_cast<double>(y.size(1));
  return 0;
}

}  // namespace

MachineShare::MachineShare(Device device, DType dtype)
    : limit_(measured_limit(device, dtype)), since_(Clock::now()) {
  core::release_cached_memory(device);
  core::reset_peak_memory(device);
}

double MachineShare::take() {
  const double share = 3 * operations_ / (seconds_since(since_) * limit_);
  operations_ = 0;
  since_ = Clock::now();
  return share;
}

void MachineShare::on_end(const autograd::OpEvent& event) {
  if (event.phase == autograd::Phase::forward && !event.outputs.empty())
    operations_ += operations_of(event);
}

}  // namespace support
