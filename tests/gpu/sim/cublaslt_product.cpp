#include "gpu/sim/cublaslt_product.h"

#include <cmath>
#include <cstddef>
#include <vector>

#include "gpu/sim/elements.h"
#include "gpu/sim/machine.h"

namespace cairn::gpusim::cublaslt {
namespace {

/// A column-major matrix without gaps.
struct Matrix {
  std::size_t rows, columns;
  std::vector<double> values;

  double& at(std::size_t row, std::size_t column) { return values[column * rows + row]; }
  double at(std::size_t row, std::size_t column) const { return values[column * rows + row]; }
};

const char* address(const void* data, const Layout& layout, std::int64_t matrix) {
  const auto size = static_cast<std::int64_t>(size_of(*element_of(layout.type)));
  return static_cast<const char*>(data) + matrix * layout.batch_stride * size;
}

/// Calls each(column's number, address, columns at once): whole where columns have no gaps, so that
/// only what is used is named.
template <class Each>
void for_columns(const Layout& layout, const char* data, Each each) {
  const std::size_t size = size_of(*element_of(layout.type));
  const auto ld = static_cast<std::size_t>(layout.ld);
  if (ld == layout.rows) return each(std::size_t{0}, data, layout.columns);
  for (std::size_t column = 0; column < layout.columns; ++column)
    each(column, data + column * ld * size, std::size_t{1});
}

Matrix load_matrix(const Layout& layout, const void* data, std::int64_t number) {
  Matrix matrix{layout.rows, layout.columns, {}};
  matrix.values.resize(matrix.rows * matrix.columns);
  const Element element = *element_of(layout.type);
  const std::size_t size = size_of(element);
  for_columns(layout, address(data, layout, number),
              [&](std::size_t first, const char* from, std::size_t columns) {
                const std::size_t count = columns * matrix.rows;
                const auto* bytes = static_cast<const char*>(read(from, count * size));
                for (std::size_t i = 0; i < count; ++i)
                  matrix.values[first * matrix.rows + i] = load(element, bytes + i * size);
              });
  return matrix;
}

void store_matrix(const Layout& layout, void* data, std::int64_t number, const Matrix& matrix) {
  const Element element = *element_of(layout.type);
  const std::size_t size = size_of(element);
  for_columns(layout, address(data, layout, number),
              [&](std::size_t first, const char* to, std::size_t columns) {
                const std::size_t count = columns * matrix.rows;
                auto* bytes = static_cast<char*>(write(const_cast<char*>(to), count * size));
                for (std::size_t i = 0; i < count; ++i)
                  store(element, bytes + i * size, matrix.values[first * matrix.rows + i]);
              });
}

Matrix transpose(const Matrix& x) {
  Matrix y{x.columns, x.rows, std::vector<double>(x.values.size())};
  for (std::size_t column = 0; column < x.columns; ++column) {
    for (std::size_t row = 0; row < x.rows; ++row) y.at(column, row) = x.at(row, column);
  }
  return y;
}

/// a b, summed along k in order.
Matrix product(const Matrix& a, const Matrix& b) {
  Matrix y{a.rows, b.columns, std::vector<double>(a.rows * b.columns, 0.0)};
  for (std::size_t column = 0; column < y.columns; ++column) {
    double* const sums = &y.values[column * y.rows];
    for (std::size_t k = 0; k < a.columns; ++k) {
      const double scale = b.at(k, column);
      const double* const terms = &a.values[k * a.rows];
      for (std::size_t row = 0; row < y.rows; ++row) sums[row] += terms[row] * scale;
    }
  }
  return y;
}

double gelu_tanh(double x) {
  const double slope = 0.7978845608028654;  // sqrt(2 / pi)
  return 0.5 * x * (1.0 + std::tanh(slope * (x + 0.044715 * x * x * x)));
}

double activate(std::uint32_t epilogue, double x) {
  if ((epilogue & CUBLASLT_EPILOGUE_RELU) != 0) return x < 0.0 ? 0.0 : x;  // NaN stays
  if ((epilogue & CUBLASLT_EPILOGUE_GELU) != 0) return gelu_tanh(x);
  return x;
}

void add_bias(const Problem& problem, const void* bias, std::int64_t number, Matrix& y) {
  const Element element = problem.bias_element();
  const std::size_t size = size_of(element);
  const auto* from = static_cast<const char*>(bias) +
                     number * problem.operation.bias_stride * static_cast<std::int64_t>(size);
  const auto* bytes = static_cast<const char*>(read(from, y.rows * size));
  for (std::size_t row = 0; row < y.rows; ++row) {
    const double value = load(element, bytes + row * size);
    for (std::size_t column = 0; column < y.columns; ++column) y.at(row, column) += value;
  }
}

}  // namespace

void multiply_one(const Problem& problem, const Pointers& pointers, double alpha, double beta,
                  std::int64_t number) {
  Matrix a = load_matrix(problem.a, pointers.a, number);
  Matrix b = load_matrix(problem.b, pointers.b, number);
  if (problem.tf32()) {
    for (Matrix* factor : {&a, &b}) {
      for (double& value : factor->values) value = to_tf32(value);
    }
  }
  if (problem.transposed(0)) a = transpose(a);
  if (problem.transposed(1)) b = transpose(b);
  Matrix y = product(a, b);
  for (double& value : y.values) value *= alpha;
  if (beta != 0.0) {
    const Matrix c = load_matrix(problem.c, pointers.c, number);
    for (std::size_t i = 0; i < y.values.size(); ++i) y.values[i] += beta * c.values[i];
  }
  if (problem.has_bias()) add_bias(problem, pointers.bias, number, y);
  for (double& value : y.values) value = activate(problem.operation.epilogue, value);
  store_matrix(problem.d, pointers.d, number, y);
}

}  // namespace cairn::gpusim::cublaslt
