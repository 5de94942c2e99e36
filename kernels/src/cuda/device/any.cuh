// Single elements whose dtype is known at run time: for conversions and results that are not on a
// hot path.
#pragma once

#include "cuda/device/convert.cuh"

namespace cairn::kernels::cuda {

/// One element of any dtype, widened without loss.
struct AnyValue {
  bool floating;
  double real;
  std::int64_t integer;
};

__device__ inline AnyValue load_any(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f16:
      return {true, widen(static_cast<const Half*>(data)[i]), 0};
    case DType::bf16:
      return {true, widen(static_cast<const BFloat16*>(data)[i]), 0};
    case DType::f32:
      return {true, static_cast<const float*>(data)[i], 0};
    case DType::f64:
      return {true, static_cast<const double*>(data)[i], 0};
    case DType::i16:
      return {false, 0, static_cast<const std::int16_t*>(data)[i]};
    case DType::i32:
      return {false, 0, static_cast<const std::int32_t*>(data)[i]};
    case DType::i64:
      return {false, 0, static_cast<const std::int64_t*>(data)[i]};
    case DType::u8:
      return {false, 0, static_cast<const std::uint8_t*>(data)[i]};
    case DType::boolean:
      break;
  }
  return {false, 0, static_cast<const bool*>(data)[i]};
}

template <class T>
__device__ T convert_any(const AnyValue& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.floating ? value.real != 0.0 : value.integer != 0;
  } else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
    return value.floating ? static_cast<T>(value.real) : static_cast<T>(value.integer);
  } else if constexpr (is_half_type<T>) {
    return narrow<T>(convert_any<float>(value));
  } else {  // a narrow integer takes the low bits, as a conversion through 64 bits does
    return static_cast<T>(value.floating ? static_cast<std::int64_t>(value.real) : value.integer);
  }
}

__device__ inline void store_any(void* data, DType dtype, std::int64_t i, const AnyValue& value) {
  switch (dtype) {
    case DType::f16:
      static_cast<Half*>(data)[i] = convert_any<Half>(value);
      break;
    case DType::bf16:
      static_cast<BFloat16*>(data)[i] = convert_any<BFloat16>(value);
      break;
    case DType::f32:
      static_cast<float*>(data)[i] = convert_any<float>(value);
      break;
    case DType::f64:
      static_cast<double*>(data)[i] = convert_any<double>(value);
      break;
    case DType::i16:
      static_cast<std::int16_t*>(data)[i] = convert_any<std::int16_t>(value);
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[i] = convert_any<std::int32_t>(value);
      break;
    case DType::i64:
      static_cast<std::int64_t*>(data)[i] = convert_any<std::int64_t>(value);
      break;
    case DType::u8:
      static_cast<std::uint8_t*>(data)[i] = convert_any<std::uint8_t>(value);
      break;
    case DType::boolean:
      static_cast<bool*>(data)[i] = convert_any<bool>(value);
      break;
  }
}

}  // namespace cairn::kernels::cuda
