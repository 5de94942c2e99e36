// Calls of C functions in tests: what they return, and arrays to hand them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "cairn.h"
#include "cairn/core/dtype.h"

namespace cairn::test {

inline void expect_ok(cairn_status status) {
  EXPECT_EQ(status, CAIRN_OK) << cairn_status_name(status) << ": " << cairn_last_error();
}

/// The call must have failed so, and have said all of these texts.
inline void expect_failed(cairn_status status, cairn_status expected,
                          std::initializer_list<std::string> texts) {
  EXPECT_EQ(status, expected) << cairn_status_name(status) << ": " << cairn_last_error();
  for (const std::string& text : texts) EXPECT_THAT(cairn_last_error(), testing::HasSubstr(text));
}

template <class T>
int32_t dtype_code() {
  switch (core::dtype_of<T>) {
    case DType::f16:
      return CAIRN_F16;
    case DType::bf16:
      return CAIRN_BF16;
    case DType::f32:
      return CAIRN_F32;
    case DType::f64:
      return CAIRN_F64;
    case DType::i64:
      return CAIRN_I64;
    default:
      return 0;
  }
}

/// Small values that differ: value i of seed s.
inline float value_of(std::size_t i, int seed) {
  return static_cast<float>((i * 37 + static_cast<std::size_t>(seed) * 101) % 64) / 32.0f - 1.0f;
}
template <class T>
std::vector<T> values_of(std::size_t count, int seed, float factor = 1.0f) {
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(T(value_of(i, seed) * factor));
  return values;
}

/// An array with its descriptor. Its values stay where they are.
template <class T>
struct Array {
  Array(std::string array_name, std::vector<int64_t> array_shape, std::vector<T> array_values)
      : name(std::move(array_name)),
        shape(std::move(array_shape)),
        values(std::move(array_values)) {}
  void fill(int seed, float factor = 1.0f) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = T(value_of(i, seed) * factor);
  }
  cairn_tensor tensor() {
    return {name.c_str(),
            values.data(),
            shape.data(),
            static_cast<int32_t>(shape.size()),
            dtype_code<T>(),
            CAIRN_CPU,
            0};
  }

  std::string name;
  std::vector<int64_t> shape;
  std::vector<T> values;
};

}  // namespace cairn::test
