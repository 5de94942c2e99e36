#include "gpu/sim/cudnn_convolution.h"

#include <algorithm>
#include <cmath>

namespace cairn::gpusim {
namespace {

constexpr std::int64_t kTooMany = std::int64_t{1} << 31;  // "limited to 2 Giga-elements"

// The engines' indices.
constexpr std::int64_t kSplitSums = 0;    // backwards alone: not deterministic
constexpr std::int64_t kUnbuilt = 1;      // proposed, and never supported
constexpr std::int64_t kLow = 2;          // f32 in f16; half sums in half
constexpr std::int64_t kTensorCores = 3;  // f32 in TF32
constexpr std::int64_t kWinograd = 4;     // 3 x 3 without strides
constexpr std::int64_t kPlain = 5;        // everything, without workspace
constexpr std::int64_t kGreedy = 6;       // wants more workspace than anybody gives

bool is_f32(const CudnnConvolution& p) {
  return p.x.type == CUDNN_DATA_FLOAT;
}

CudnnPrecision precision_of(const CudnnConvolution& p, const CudnnConfig& config) {
  if (config.engine == kLow) return CudnnPrecision::low;
  const bool tf32 = config.engine == kTensorCores && is_f32(p);
  return tf32 ? CudnnPrecision::tf32 : CudnnPrecision::full;
}

std::int64_t output_size(const CudnnConvolution& p, std::size_t axis) {
  const std::int64_t reach = p.dilation[axis] * (p.w.sizes[axis + 2] - 1) + 1;
  return (p.x.sizes[axis + 2] + 2 * p.padding[axis] - reach) / p.stride[axis] + 1;
}

bool has_too_many(const CudnnTensor& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t size : tensor.sizes) {
    count *= size;
    if (count >= kTooMany) return true;
  }
  return false;
}

/// Rounded to f16's 10 bits of fraction, or to fewer: a sum that was rounded as it grew.
double to_low(double x, bool sum) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1.0, std::ilogb(x) - (sum ? 5 : 10));
  return std::nearbyint(x / unit) * unit;
}

using Values = CudnnValues;

/// The first and one past the last output whose input, offset + stride o, is inside.
std::array<std::int64_t, 2> inside(std::int64_t offset, std::int64_t stride, std::int64_t size,
                                   std::int64_t outputs) {
  const std::int64_t first = offset >= 0 ? 0 : (-offset + stride - 1) / stride;
  const std::int64_t last = offset >= size ? 0 : (size - 1 - offset) / stride + 1;
  return {first, std::min(last, outputs)};
}

/// Calls term(index in y, index in x, index in w) for every product of the convolution.
template <class Term>
void for_terms(const CudnnConvolution& p, Term term) {
  const std::int64_t N = p.y.sizes[0], O = p.y.sizes[1];
  const std::int64_t I = p.w.sizes[1], kH = p.w.sizes[2], kW = p.w.sizes[3];
  const std::int64_t C = p.x.sizes[1], H = p.x.sizes[2], W = p.x.sizes[3];
  const std::int64_t out = O / p.groups();
  const auto u = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const auto row = [&](std::int64_t map, std::int64_t x_map, std::int64_t w_map, std::int64_t kh,
                       std::int64_t kw) {
    const std::int64_t down = kh * p.dilation[0] - p.padding[0];
    const std::int64_t along = kw * p.dilation[1] - p.padding[1];
    const auto [top, bottom] = inside(down, p.stride[0], H, p.y.sizes[2]);
    const auto [left, right] = inside(along, p.stride[1], W, p.y.sizes[3]);
    const std::int64_t w = (w_map * kH + kh) * kW + kw;
    for (std::int64_t oh = top; oh < bottom; ++oh) {
      const std::int64_t y = (map * p.y.sizes[2] + oh) * p.y.sizes[3];
      const std::int64_t x = (x_map * H + oh * p.stride[0] + down) * W + along;
      for (std::int64_t ow = left; ow < right; ++ow) term(u(y + ow), u(x + ow * p.stride[1]), u(w));
    }
  };
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t o = 0; o < O; ++o) {
      const std::int64_t first = o / out * I;  // channel of the group
      for (std::int64_t i = 0; i < I; ++i) {
        for (std::int64_t tap = 0; tap < kH * kW; ++tap)
          row(n * O + o, n * C + first + i, o * I + i, tap / kW, tap % kW);
      }
    }
  }
}

Values sums_of(const CudnnConvolution& p, CudnnPrecision precision,
               const std::array<void*, 3>& data) {
  const auto factor = [&](const CudnnTensor& tensor, const void* from) {
    if (&tensor == &p.result()) return Values();
    Values values = load_tensor(tensor, from);
    if (precision == CudnnPrecision::tf32)
      std::transform(values.begin(), values.end(), values.begin(), to_tf32);
    if (precision == CudnnPrecision::low)
      for (double& value : values) value = to_low(value, false);
    return values;
  };
  const Values x = factor(p.x, data[0]), w = factor(p.w, data[1]), y = factor(p.y, data[2]);
  Values sums(p.result().count(), 0.0);
  switch (p.pass) {
    case CudnnPass::forward:
      for_terms(p, [&](auto iy, auto ix, auto iw) { sums[iy] += x[ix] * w[iw]; });
      break;
    case CudnnPass::backward_data:
      for_terms(p, [&](auto iy, auto ix, auto iw) { sums[ix] += y[iy] * w[iw]; });
      break;
    case CudnnPass::backward_filter:
      for_terms(p, [&](auto iy, auto ix, auto iw) { sums[iw] += x[ix] * y[iy]; });
      break;
  }
  if (precision == CudnnPrecision::low && !is_f32(p))
    for (double& sum : sums) sum = to_low(sum, true);
  return sums;
}

}  // namespace

const CudnnTensor& CudnnConvolution::result() const {
  if (pass == CudnnPass::forward) return y;
  return pass == CudnnPass::backward_data ? x : w;
}

bool CudnnConvolution::is_consistent() const {
  const bool channels =
      x.sizes[1] % w.sizes[1] == 0 && w.sizes[0] % groups() == 0 && y.sizes[1] == w.sizes[0];
  return channels && y.sizes[0] == x.sizes[0] && y.sizes[2] == output_size(*this, 0) &&
         y.sizes[3] == output_size(*this, 1);
}

std::vector<CudnnEngine> engines_of(const CudnnConvolution& p) {
  const auto low = is_f32(p) ? CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS
                             : CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION;
  return {{{CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}, false},
          {{}, false},
          {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE, low}, false},
          {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, true},
          {{CUDNN_NUMERICAL_NOTE_WINOGRAD}, false},
          {{}, false},
          {{}, false}};
}

std::vector<CudnnConfig> proposals(const CudnnConvolution& p, cudnnBackendHeurMode_t mode) {
  if (mode == CUDNN_HEUR_MODE_FALLBACK) return {{kPlain, 0}};
  if (mode == CUDNN_HEUR_MODE_B)
    return {{kTensorCores, 3}, {kTensorCores, 1}, {kWinograd, 0}, {kPlain, 0}};
  std::vector<CudnnConfig> found;
  if (p.pass != CudnnPass::forward) found.push_back({kSplitSums, 0});
  found.insert(found.end(), {{kUnbuilt, 0},
                             {kLow, 0},
                             {kGreedy, 0},
                             {kTensorCores, 2},
                             {kWinograd, 0},
                             {kTensorCores, 1}});
  return found;
}

cudnnStatus_t check_support(const CudnnConvolution& p, const CudnnConfig& config) {
  const bool known = is_f32(p) || p.x.type == CUDNN_DATA_HALF || p.x.type == CUDNN_DATA_BFLOAT16;
  if (!known || p.w.type != p.x.type || p.y.type != p.x.type || p.compute != CUDNN_DATA_FLOAT)
    return CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE;
  if (has_too_many(p.x) || has_too_many(p.w) || has_too_many(p.y))
    return CUDNN_STATUS_NOT_SUPPORTED_SHAPE;
  const auto packed = [&](bool last) {
    return p.x.is_packed(last) && p.w.is_packed(last) && p.y.is_packed(last);
  };
  const bool grouped_last = p.groups() > 1 && is_f32(p) && !packed(false);
  if ((!packed(false) && !packed(true)) || grouped_last) return CUDNN_STATUS_NOT_SUPPORTED_LAYOUT;
  const bool three = p.w.sizes[2] == 3 && p.w.sizes[3] == 3 && p.groups() == 1 &&
                     p.stride == std::array<std::int64_t, 2>{1, 1} &&
                     p.dilation == std::array<std::int64_t, 2>{1, 1};
  const bool refused = config.engine == kUnbuilt || (config.engine == kWinograd && !three) ||
                       (config.engine == kSplitSums && p.pass == CudnnPass::forward);
  return refused ? CUDNN_STATUS_NOT_SUPPORTED : CUDNN_STATUS_SUCCESS;
}

std::size_t workspace_of(const CudnnConvolution& p, const CudnnConfig& config) {
  if (config.engine == kPlain) return 0;
  if (config.engine == kGreedy) return std::size_t{1} << 40;
  const auto odd = static_cast<std::size_t>(p.x.sizes[2] % 7 + p.w.sizes[0] % 5);
  return 16384 + 48 * odd + 1024 * static_cast<std::size_t>(config.engine + config.tile);
}

void run_convolution(const CudnnConvolution& p, const CudnnConfig& config,
                     const std::array<void*, 3>& data) {
  Values result = sums_of(p, precision_of(p, config), data);
  void* const target = data[p.pass == CudnnPass::forward         ? 2
                            : p.pass == CudnnPass::backward_data ? 0
                                                                 : 1];
  for (double& value : result) value *= p.alpha;
  if (p.beta != 0.0) {
    const Values before = load_tensor(p.result(), target);
    for (std::size_t i = 0; i < result.size(); ++i) result[i] += p.beta * before[i];
  }
  store_tensor(p.result(), target, result);
}

}  // namespace cairn::gpusim
