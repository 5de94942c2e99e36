#include "histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cairn/core/sharding.h"

namespace cairn::observe {

namespace {

// Of an f32: its eight bits of exponent and the first three of its fraction.
constexpr int kShift = 20;
constexpr std::uint32_t kMagnitude = 0x7fffffff;
constexpr std::size_t kKeys = std::size_t{1} << (31 - kShift), kFiniteKeys = kKeys / 256 * 255;

double lower_end(std::size_t key) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(key) << kShift);
}

double upper_end(std::size_t key) {
  return key + 1 < kFiniteKeys ? lower_end(key + 1)
                               : static_cast<double>(std::numeric_limits<float>::max());
}

/// A limit for each count that is not 0, and one ahead of it where there is a gap.
class Limits {
 public:
  void add(double lower, double upper, std::int64_t count) {
    if (count == 0) return;
    if (limits_.empty() || limits_.back().value != lower) limits_.push_back({lower, 0});
    limits_.push_back({upper, count});
  }
  std::vector<Histogram::Limit> take() { return std::move(limits_); }

 private:
  std::vector<Histogram::Limit> limits_;
};

double largest(DType dtype) {
  if (dtype == DType::f16) return 65504;
  if (dtype == DType::bf16) return 0x1.fep127;
  return dtype == DType::f64 ? std::numeric_limits<double>::max()
                             : std::numeric_limits<float>::max();
}

/// What an optimizer would step: undefined where there is none.
struct Gradient {
  Tensor tensor;
  double scale = 1;
};
Gradient gradient_of(const Tensor& parameter) {
  const core::GradientSlot* const slot = parameter.gradient_slot_or_null();
  if (slot == nullptr) return {};
  if (slot->holds_gradient()) return {slot->gradient(), slot->scale().factor};
  return slot->has_sum() ? Gradient{slot->sum()} : Gradient{};
}

}  // namespace

Histogram Histogram::of(const Tensor& tensor, double scale) {
  std::vector<std::int64_t> positive(kKeys), negative(kKeys);
  Histogram made;
  for (const float as_it_lies : tensor.to_vector<float>()) {
    const double value = as_it_lies / scale;
    if (!std::isfinite(as_it_lies)) {
      ++made.not_finite;
      continue;
    }
    ++made.count;
    made.low = std::min(made.low, value), made.high = std::max(made.high, value);
    made.sum += value, made.squares += value * value;
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    ++(value < 0 ? negative : positive)[(bits & kMagnitude) >> kShift];
    if (value != 0) ++made.octaves[std::ilogb(value)];
  }
  Limits limits;
  for (std::size_t key = kFiniteKeys; key-- > 0;)
    limits.add(-upper_end(key), -lower_end(key), negative[key]);
  for (std::size_t key = 0; key < kFiniteKeys; ++key)
    limits.add(lower_end(key), upper_end(key), positive[key]);
  made.limits = limits.take();
  return made;
}

LayerRecord layer_record(const NamedTensor& parameter, std::int64_t step, double time) {
  LayerRecord record{.step = step, .time = time, .name = parameter.name};
  const core::WeightInParts* parts = core::WeightInParts::of(parameter.tensor);
  record.weights = Histogram::of(parts == nullptr ? parameter.tensor : parts->part(), 1);
  const Gradient gradient = gradient_of(parameter.tensor);
  if (!gradient.tensor.defined()) return record;
  record.dtype = gradient.tensor.dtype();
  record.gradients = Histogram::of(gradient.tensor, gradient.scale);
  const Histogram& found = record.gradients;
  const double most = found.count == 0 ? 0 : std::max(-found.low, found.high) * gradient.scale;
  record.bits_left = found.not_finite > 0 ? -1
                     : most > 0           ? std::log2(largest(record.dtype) / most)
                                          : std::numeric_limits<double>::infinity();
  return record;
}

}  // namespace cairn::observe
