// Everything here is exact arithmetic or correctly rounded IEEE operations in a fixed order (no
// libm, no contraction: see CMakeLists.txt), so a seed gives the same values on every machine.
#include "cairn/core/generator.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/tensor.h"
#include "capture.h"

namespace cairn::core {

namespace {

constexpr std::int64_t kDrawsPerThread = 1 << 14;

// Uniform in (0, 1) with 53 bits: never 0, so its logarithm is finite.
double uniform_open(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// Natural logarithm of a positive normal number, about 1e-15 relative: x = m 2^e with m in
// [sqrt(1/2), sqrt(2)), ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
double ln(double x) {
  auto bits = std::bit_cast<std::uint64_t>(x);
  auto exponent = static_cast<int>(bits >> 52) - 1022;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3fe0000000000000u);  // [1/2, 1)
  if (m < std::numbers::sqrt2 / 2) {
    m *= 2;
    --exponent;
  }
  const double s = (m - 1) / (m + 1);
  const double s2 = s * s;
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return exponent * std::numbers::ln2 + 2 * s * sum;
}

// cos(2 pi t) for t in [0, 1): folded to |angle| <= pi / 4, then Taylor.
double cos_turns(double t) {
  const int octant = static_cast<int>(t * 8);
  const int nearest = (octant + 1) / 2;  // multiple of a quarter turn
  const int quarter = nearest % 4;
  double rest = t - nearest * 0.25;
  const double angle = rest * (2 * std::numbers::pi);
  const double a2 = angle * angle;
  double cosine = 1, sine = 1;
  for (int k = 18; k >= 2; k -= 2) cosine = 1 - cosine * a2 / (k * (k - 1));
  for (int k = 19; k >= 3; k -= 2) sine = 1 - sine * a2 / (k * (k - 1));
  sine *= angle;
  switch (quarter) {
    case 0:
      return cosine;
    case 1:
      return -sine;
    case 2:
      return -cosine;
    default:
      return sine;
  }
}

// Box-Muller.
double normal_from_words(const std::array<std::uint32_t, 4>& words) {
  const double radius = std::sqrt(-2 * ln(uniform_open(words[0], words[1])));
  return radius * cos_turns(uniform_open(words[2], words[3]));
}

template <class F>
void fill(Generator& generator, const Tensor& x, const char* where, F value_of) {
  CAIRN_CHECK(x.dtype() == DType::f32 && x.device().is_cpu() && x.view().is_dense(), where,
              "expected a dense f32 tensor on a CPU device, got ", x.dtype(), " ", x.shape(),
              " on ", x.device());
  const std::uint64_t seed = generator.seed();
  const std::uint64_t offset = generator.next();
  const TensorView view = x.view();
  const Strides row_major = contiguous_strides(view.shape);
  const bool contiguous = view.is_contiguous();
  auto* out = view.as<float>();
  parallel_for(view.numel(), kDrawsPerThread, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t at = i;
      if (!contiguous) {
        at = 0;
        for (int d = 0; d < view.dims(); ++d) {
          at += i / row_major[d] % view.shape[d] * view.strides[d];
        }
      }
      out[at] = static_cast<float>(value_of(philox(seed, offset, static_cast<std::uint64_t>(i))));
    }
  });
}

}  // namespace

void Generator::fill_uniform(const Tensor& x, double low, double high) {
  fill(*this, x, "fill_uniform",
       [=](const auto& words) { return low + (high - low) * uniform_open(words[0], words[1]); });
}

void Generator::fill_normal(const Tensor& x, double mean, double stddev) {
  fill(*this, x, "fill_normal",
       [=](const auto& words) { return mean + stddev * normal_from_words(words); });
}

RandomDraw Generator::draw() {
  const Capture* capture = current_capture();
  if (capture == nullptr) return {seed_, offset_++};
  CAIRN_CHECK(seed_ == capture->before.seed() && offset_ >= capture->before.offset(), "random",
              "expected a captured step to draw from the generator as the step found it, got "
              "another seed or an earlier offset (seed outside of the step)");
  return {0, offset_++ - capture->before.offset(), capture->random_base};
}

std::uint64_t Generator::next() {
  refuse_in_capture("random", "an operation that takes its random numbers by value");
  return offset_++;
}

StateDict Generator::state_dict() const {
  StateDict state;
  state.set("seed", static_cast<std::int64_t>(seed_));
  state.set("offset", static_cast<std::int64_t>(offset_));
  return state;
}

void Generator::load_state_dict(const StateDict& state) {
  const auto seed = static_cast<std::uint64_t>(state.integer("seed"));
  const auto offset = static_cast<std::uint64_t>(state.integer("offset"));
  set(seed, offset);
}

Generator& Generator::current() {
  thread_local Generator generator;
  return generator;
}

void manual_seed(std::uint64_t seed) {
  Generator::current().set(seed);
}

}  // namespace cairn::core
