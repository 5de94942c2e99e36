#include "cairn/core/dtype.h"

#include <algorithm>
#include <array>
#include <ostream>

namespace cairn::core {

namespace {
constexpr std::array kAll = {DType::f16, DType::bf16, DType::f32, DType::f64,    DType::i16,
                             DType::i32, DType::i64,  DType::u8,  DType::boolean};

// Among integers and bool the wider one holds every value of both.
int integer_rank(DType dtype) {
  switch (dtype) {
    case DType::boolean:
      return 0;
    case DType::u8:
      return 1;
    case DType::i16:
      return 2;
    case DType::i32:
      return 3;
    case DType::i64:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64:
      break;
  }
  return 5;
}
}  // namespace

DType promote(DType a, DType b) {
  if (a == b) return a;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  if (!is_floating(a)) return integer_rank(a) > integer_rank(b) ? a : b;
  if (a == DType::f64 || b == DType::f64) return DType::f64;
  return DType::f32;
}

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::i16:
      return "i16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
    case DType::boolean:
      return "bool";
  }
  return "unknown";
}

DType parse_dtype(std::string_view text) {
  const auto* found =
      std::find_if(kAll.begin(), kAll.end(), [&](DType d) { return name(d) == text; });
  CAIRN_CHECK(found != kAll.end(), "dtype",
              "expected one of f16, bf16, f32, f64, i16, i32, i64, u8, bool, got \"", text, "\"");
  return *found;
}

std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << name(dtype);
}

}  // namespace cairn::core
