// A product by a matrix that many calls share: brought once into the form that oneDNN likes best.
// For a few rows, copying the matrix into that form takes longer than multiplying by it.
#pragma once

#include "backend.h"
#include "cpu/dnnl_operation.h"
#include "temporary.h"

namespace cairn::kernels {

class PackedProduct {
 public:
  /// By b [K, N], which stays as it is for as long, for `rows` rows.
  PackedProduct(const Backend& backend, std::int64_t rows, const TensorView& b, bool accumulate);

  /// y [rows, N] = a b, or y += a b: a [rows, K] of b's dtype, y f32 (f64 for f64), both
  /// contiguous.
  void operator()(const TensorView& a, const TensorView& y) const;

 private:
  const Backend& backend_;
  bool accumulate_;
  onednn::OperationPtr product_;  // null for f64, which is not oneDNN's
  DType compute_ = DType::f64;
  Temporary b_;
};

}  // namespace cairn::kernels
