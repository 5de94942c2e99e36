// Matrix products: the layout they are told in, and the choice of their route.
#include <algorithm>
#include <cmath>

#include "cpu/cpu_backend.h"
#include "cpu/product.h"
#include "temporary.h"

namespace cairn::kernels {

void matmul_f64(const TensorView& a, const TensorView& b, const TensorView& y,
                const MatmulOptions& options);  // matmul_f64.cpp

namespace {

// Told so that y's rows lie together, where that is possible.
MatmulOperands oriented(const MatmulOperands& m, const MatmulOptions& options) {
  const auto by_rows = [](const TensorView& y) {
    return y.strides[y.dims() - 1] == 1 && is_plain_matrix(y);
  };
  const MatmulOperands transposed = m.transposed();
  const bool turn = !by_rows(m.y) && !options.bias.defined() && by_rows(transposed.y);
  return turn ? transposed : m;
}

std::int64_t multiplications(const MatmulOperands& m) {
  return m.y.numel() * m.a.size(-1);
}

DType compute_dtype_of(const MatmulOperands& m) {
  return onednn::compute_dtype_of_product(m.a.dtype, m.a.size(-1));
}

std::string class_name(const MatmulOperands& m) {
  const bool usual = compute_dtype_of(m) == onednn::compute_dtype(m.a.dtype);
  const auto lies = [](const TensorView& view) {
    return view.strides[view.dims() - 1] == 1 || view.size(-1) == 1 ? "n" : "t";
  };
  return core::str("matmul ", core::name(m.a.dtype), " to ", core::name(m.y.dtype), " ", lies(m.a),
                   lies(m.b), " ", rounded(matrix_count(m.y)), "x", rounded(m.y.size(-2)), "x",
                   rounded(m.a.size(-1)), "x", rounded(m.y.size(-1)), ", ",
                   onednn::threads_for(multiplications(m)), " threads", usual ? "" : ", in f32");
}

// A corner of y that takes some milliseconds.
MatmulOperands part_to_time(const MatmulOperands& m) {
  constexpr double kMost = 1 << 30;  // multiplications
  const double share = std::min(1.0, std::sqrt(kMost / static_cast<double>(multiplications(m))));
  const auto some = [share](std::int64_t size) {
    return std::min(
        size, static_cast<std::int64_t>(std::ceil(share * static_cast<double>(size) / 64)) * 64);
  };
  const std::int64_t rows = some(m.y.size(-2)), columns = some(m.y.size(-1));
  return {m.a.slice(-2, 0, rows), m.b.slice(-1, 0, columns),
          m.y.slice(-2, 0, rows).slice(-1, 0, columns)};
}

// Writes y, which the product overwrites next, or what stands in for it where that is added to.
void run_to_time(const Backend& backend, const MatmulOperands& m, MatmulOptions options,
                 const Route& route) {
  MatmulOperands part = part_to_time(m);
  Temporary sums;
  if (options.accumulate) {
    sums = temporary(part.y.shape, part.y.dtype, part.y.device);
    part.y = sums.view;
  }
  if (options.bias.defined()) options.bias = options.bias.slice(0, 0, part.y.size(-1));
  multiply(backend, part, options, route);
}

// Large halves that are multiplied in f32 go through it in blocks alone: whole in f32 they would be
// memory that nobody planned for.
bool takes_blocks(const MatmulOperands& m, DType compute) {
  constexpr std::int64_t kMostWhole = std::int64_t{4} << 20;  // elements
  const std::int64_t most = std::max({m.a.numel(), m.b.numel(), m.y.numel()});
  return m.a.dtype != compute && matrix_count(m.y) == 1 && most > kMostWhole;
}

std::vector<Route> routes_of(const MatmulOperands& m) {
  const DType own = compute_dtype_of(m);
  if (takes_blocks(m, own)) return {{own, true}};
  std::vector<Route> routes{{own, false}};
  if (matrix_count(m.y) == 1) routes.push_back({own, true});
  if (own != DType::f32) routes.push_back({DType::f32, true});
  return routes;
}

Route route_of(const Backend& backend, const MatmulOperands& m, const MatmulOptions& options) {
  onednn::Key key("route", onednn::threads_for(multiplications(m)));
  key.add(m.a).add(m.b).add(m.y);
  return choose({.key = std::move(key),
                 .multiplications = multiplications(m),
                 .name = [&] { return class_name(m); },
                 .routes = routes_of(m),
                 .run = [&](const Route& route) { run_to_time(backend, m, options, route); }});
}

void product(const Backend& backend, const TensorView& a, const TensorView& b, const TensorView& y,
             const MatmulOptions& options) {
  const MatmulOperands m = oriented(merge_batches({a, b, y}), options);
  multiply(backend, m, options, route_of(backend, m, options));
}

}  // namespace

void CpuBackend::matmul(View a, View b, View y, const MatmulOptions& options) const {
  MatmulOptions plain = options;
  const bool apart = options.pre_activation.defined() || a.dtype == DType::f64;
  const TensorView& sum = options.pre_activation.defined() ? options.pre_activation : y;
  if (apart) {
    plain.activation = Activation::none;
    plain.pre_activation = {};
  }
  if (a.dtype == DType::f64) {
    matmul_f64(a, b, sum, plain);
  } else {
    product(*this, a, b, sum, plain);
  }
  if (apart && options.activation != Activation::none) {
    unary(unary_of(options.activation), sum, y, 0.0);
  } else if (options.pre_activation.defined()) {
    copy(sum, y);
  }
}

}  // namespace cairn::kernels
