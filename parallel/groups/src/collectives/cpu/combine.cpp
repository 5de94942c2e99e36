#include "collectives/cpu/combine.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cairn/core/error.h"
#include "cairn/core/half.h"

namespace cairn::parallel {
namespace {

using core::BFloat16;
using core::Half;

// Elements that are combined at a time: so few that they stay in registers.
constexpr std::size_t kBlock = 16;

// Conversions without branches, which the compiler turns into vector code; the same values as
// core's.

std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

float widen(Half x) {
  const std::uint32_t w = std::uint32_t{x.bits} << 16;
  const std::uint32_t sign = w & 0x80000000u, twice = w + w;
  const float normal = std::bit_cast<float>((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
  const float subnormal = std::bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
  const std::uint32_t magnitude =
      select(twice < (1u << 27), std::bit_cast<std::uint32_t>(subnormal),
             std::bit_cast<std::uint32_t>(normal));
  return std::bit_cast<float>(sign | magnitude);
}
float widen(BFloat16 x) {
  return std::bit_cast<float>(std::uint32_t{x.bits} << 16);
}
template <class T>
T widen(T x) {
  return x;
}

void narrow(float x, Half& y) {
  const auto w = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = w & 0x80000000u, twice = w + w;
  // The first product overflows to infinity for values beyond f16's 65504.
  float base = (std::bit_cast<float>(w & 0x7fffffffu) * 0x1p+112f) * 0x1p-110f;
  const std::uint32_t bias = std::max(twice & 0xff000000u, 0x71000000u);
  // The sum with this power of two rounds to nearest even at f16's last bit.
  base = std::bit_cast<float>((bias >> 1) + 0x07800000u) + base;
  const auto bits = std::bit_cast<std::uint32_t>(base);
  const std::uint32_t magnitude = ((bits >> 13) & 0x7c00u) + (bits & 0xfffu);
  y.bits = static_cast<std::uint16_t>(sign >> 16 | select(twice > 0xff000000u, 0x7e00u, magnitude));
}
void narrow(float x, BFloat16& y) {
  const auto w = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = w + 0x7fffu + ((w >> 16) & 1u);
  const std::uint32_t nan = w | 0x400000u;
  y.bits = static_cast<std::uint16_t>(select((w & 0x7fffffffu) > 0x7f800000u, nan, rounded) >> 16);
}
template <class T>
void narrow(T x, T& y) {
  y = x;
}

template <class A>
bool is_nan(A x) {
  if constexpr (std::is_floating_point_v<A>) return std::isnan(x);
  return false;
}

/// Integers wrap around.
template <class A>
A add(A a, A b) {
  if constexpr (std::is_floating_point_v<A>) return a + b;
  return static_cast<A>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}
template <class A>
A multiply(A a, A b) {
  if constexpr (std::is_floating_point_v<A>) return a * b;
  return static_cast<A>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}

template <class A>
A fold(ReduceOp op, A acc, A x) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean:
      return add(acc, x);
    case ReduceOp::product:
      return multiply(acc, x);
    case ReduceOp::max:
      return x > acc || is_nan(x) ? x : acc;
    case ReduceOp::min:
      return x < acc || is_nan(x) ? x : acc;
  }
  return acc;
}

/// n elements.
template <std::size_t n, ReduceOp op, class T>
void combine_block(const std::vector<const void*>& inputs, T* out, std::size_t begin) {
  using A = decltype(widen(T{}));
  std::array<A, n> acc;
  const T* first = static_cast<const T*>(inputs[0]) + begin;
  const T* second = static_cast<const T*>(inputs[1]) + begin;
  for (std::size_t i = 0; i < n; ++i) acc[i] = fold(op, widen(first[i]), widen(second[i]));
  for (std::size_t k = 2; k < inputs.size(); ++k) {
    const T* x = static_cast<const T*>(inputs[k]) + begin;
    for (std::size_t i = 0; i < n; ++i) acc[i] = fold(op, acc[i], widen(x[i]));
  }
  if constexpr (op == ReduceOp::mean) {
    const auto ranks = static_cast<A>(inputs.size());
    if (std::has_single_bit(inputs.size())) {  // the same bits, and faster
      for (std::size_t i = 0; i < n; ++i) acc[i] = static_cast<A>(acc[i] * (A{1} / ranks));
    } else {
      for (std::size_t i = 0; i < n; ++i) acc[i] = static_cast<A>(acc[i] / ranks);
    }
  }
  for (std::size_t i = 0; i < n; ++i) narrow(acc[i], out[begin + i]);
}

template <ReduceOp op, class T>
void combine_all(const std::vector<const void*>& inputs, T* out, std::size_t n) {
  std::size_t begin = 0;
  for (; begin + kBlock <= n; begin += kBlock) combine_block<kBlock, op>(inputs, out, begin);
  for (; begin < n; ++begin) combine_block<1, op>(inputs, out, begin);
}

}  // namespace

std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::mean:
      return "mean";
    case ReduceOp::max:
      return "max";
    case ReduceOp::min:
      return "min";
    case ReduceOp::product:
      return "product";
  }
  return "?";
}

void check_reducible(const char* where, ReduceOp op, DType dtype) {
  CAIRN_CHECK(op != ReduceOp::mean || core::is_floating(dtype), where,
              "expected a floating dtype for mean, got ", dtype);
  CAIRN_CHECK((op != ReduceOp::sum && op != ReduceOp::product) || dtype != DType::boolean, where,
              "expected numbers for ", name(op), ", got ", dtype, " (max is any, min is all)");
}

void combine(ReduceOp op, DType dtype, const std::vector<const void*>& inputs, void* out,
             std::size_t n) {
  check_reducible("combine", op, dtype);
  if (dtype == DType::boolean) dtype = DType::u8;
  core::dispatch_all(dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (!std::is_same_v<T, bool>) {
      T* y = static_cast<T*>(out);
      switch (op) {
        case ReduceOp::sum:
          return combine_all<ReduceOp::sum>(inputs, y, n);
        case ReduceOp::mean:
          return combine_all<ReduceOp::mean>(inputs, y, n);
        case ReduceOp::max:
          return combine_all<ReduceOp::max>(inputs, y, n);
        case ReduceOp::min:
          return combine_all<ReduceOp::min>(inputs, y, n);
        case ReduceOp::product:
          return combine_all<ReduceOp::product>(inputs, y, n);
      }
    }
  });
}

}  // namespace cairn::parallel
