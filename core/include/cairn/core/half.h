// The two half-precision storage types, usable in host and device code. Arithmetic happens in
// float: convert, compute, convert back (round to nearest even, as hardware does).
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define CAIRN_HOST_DEVICE __host__ __device__
#else
#define CAIRN_HOST_DEVICE
#endif

namespace cairn::core {

namespace detail {
// std::bit_cast is constexpr and needs no CUDA header; nvcc takes it with --expt-relaxed-constexpr.
CAIRN_HOST_DEVICE constexpr std::uint32_t float_bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
CAIRN_HOST_DEVICE constexpr float bits_float(std::uint32_t x) {
  return std::bit_cast<float>(x);
}

CAIRN_HOST_DEVICE constexpr std::uint16_t f16_from_float(float value) {
  const std::uint32_t bits = float_bits(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN stays NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude >= 0x38800000u) {                       // normal
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude < 0x33000000u) return sign;        // rounds to zero
  const std::uint32_t exponent = magnitude >> 23;  // subnormal: shift the implicit bit into place
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const std::uint32_t shift = 126u - exponent;
  const std::uint32_t half = 1u << (shift - 1u);
  const std::uint32_t odd = (mantissa >> shift) & 1u;
  return static_cast<std::uint16_t>(sign | ((mantissa + half - 1u + odd) >> shift));
}

CAIRN_HOST_DEVICE constexpr float float_from_f16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31u) return bits_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0u) return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * (1.0f / 16777216.0f);  // 2^-24
  return bits_float(float_bits(magnitude) | sign);
}

CAIRN_HOST_DEVICE constexpr std::uint16_t bf16_from_float(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
}  // namespace detail

/// IEEE binary16: 5 exponent bits, 10 mantissa bits, largest finite value 65504.
struct Half {
  std::uint16_t bits = 0;
  Half() = default;
  CAIRN_HOST_DEVICE constexpr explicit Half(float x) : bits(detail::f16_from_float(x)) {}
  CAIRN_HOST_DEVICE constexpr explicit operator float() const {
    return detail::float_from_f16(bits);
  }
};

/// bfloat16: the upper half of a float, 8 exponent bits, 7 mantissa bits.
struct BFloat16 {
  std::uint16_t bits = 0;
  BFloat16() = default;
  CAIRN_HOST_DEVICE constexpr explicit BFloat16(float x) : bits(detail::bf16_from_float(x)) {}
  CAIRN_HOST_DEVICE constexpr explicit operator float() const {
    return detail::bits_float(static_cast<std::uint32_t>(bits) << 16);
  }
};

}  // namespace cairn::core
