// Element types of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>

#include "cairn/core/error.h"
#include "cairn/core/half.h"

namespace cairn::core {

enum class DType : std::uint8_t { f16, bf16, f32, f64, i16, i32, i64, u8, boolean };

constexpr std::size_t size_of(DType dtype) {  // bytes
  switch (dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::i16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::u8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

constexpr bool is_half(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16;
}
constexpr bool is_floating(DType dtype) {
  return is_half(dtype) || dtype == DType::f32 || dtype == DType::f64;
}

/// The type that holds every value of both: f16 with bf16 gives f32, and a float with an integer
/// gives the float.
DType promote(DType a, DType b);

/// "f16", "bf16", "f32", "f64", "i16", "i32", "i64", "u8" or "bool".
std::string_view name(DType dtype);
DType parse_dtype(std::string_view text);  // throws InvalidArgument with the accepted names
std::ostream& operator<<(std::ostream& out, DType dtype);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<Half> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<std::int16_t> {
  static constexpr DType value = DType::i16;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

/// Calls f(T{}) with the C++ type of a floating dtype; throws InvalidArgument("[where] ...") for
/// any other.
template <class F>
decltype(auto) dispatch_floating(DType dtype, std::string_view where, F&& f) {
  switch (dtype) {
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::boolean:
      break;
  }
  fail(where, "expected f16, bf16, f32 or f64, got ", name(dtype));
}

/// Calls f(T{}) with the C++ type of any dtype.
template <class F>
decltype(auto) dispatch_all(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::i16:
      return f(std::int16_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::u8:
      return f(std::uint8_t{});
    case DType::boolean:
      return f(bool{});
  }
  fail("dtype", "unknown dtype ", static_cast<int>(dtype));
}

}  // namespace cairn::core

namespace cairn {
using core::DType;
}
