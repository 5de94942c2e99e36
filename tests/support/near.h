// Values against expected ones. tensors.h has expect_close, for tolerances that are relative and
// absolute.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace cairn::test {

/// Every |got - expected| <= tolerance; equal infinities match, NaN matches nothing.
template <class T>
void expect_near(const std::vector<T>& got, const std::vector<T>& expected, double tolerance,
                 const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    ASSERT_NEAR(got[i], expected[i], tolerance) << what << "[" << i << "]";
  }
}

template <class T>
void expect_near(const std::vector<std::vector<T>>& got,
                 const std::vector<std::vector<T>>& expected, double tolerance,
                 const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    expect_near(got[i], expected[i], tolerance, what + "[" + std::to_string(i) + "]");
  }
}

/// Every |got - expected| <= tolerance times the largest |expected| that is finite, or times
/// `least`: for sums of terms of about that size, whose rounding does not shrink where they cancel.
/// Equal infinities and NaN match.
inline void expect_near_largest(const std::vector<double>& got, const std::vector<double>& expected,
                                double tolerance, double least = 0, const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double largest = least;
  for (const double e : expected) {
    if (std::isfinite(e)) largest = std::max(largest, std::abs(e));
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
    ASSERT_NEAR(got[i], expected[i], tolerance * largest) << what << "[" << i << "]";
  }
}

}  // namespace cairn::test
