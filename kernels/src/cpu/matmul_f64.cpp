// Products of doubles, which oneDNN does not have: a plain loop, for gradient checks and small
// systems.
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cairn/kernels/matmul.h"
#include "cpu/matmul_layout.h"

namespace cairn::kernels {

void matmul_f64(const TensorView& a, const TensorView& b, const TensorView& y,
                const MatmulOptions& options) {
  const std::int64_t rows = y.size(-2), columns = y.size(-1), depth = a.size(-1);
  const int row = y.dims() - 2, column = y.dims() - 1;
  core::parallel_for(y.numel() / columns, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> sums(static_cast<std::size_t>(columns));
    for (std::int64_t i = begin; i < end; ++i) {
      const double* pa = a.as<double>() + matrix_offset(a, i / rows) + i % rows * a.strides[row];
      const double* pb = b.as<double>() + matrix_offset(b, i / rows);
      double* py = y.as<double>() + matrix_offset(y, i / rows) + i % rows * y.strides[row];
      sums.assign(sums.size(), 0.0);
      for (std::int64_t k = 0; k < depth; ++k) {
        const double factor = pa[k * a.strides[column]];
        const double* from = pb + k * b.strides[row];
        for (std::int64_t j = 0; j < columns; ++j)
          sums[static_cast<std::size_t>(j)] += factor * from[j * b.strides[column]];
      }
      for (std::int64_t j = 0; j < columns; ++j) {
        double value = options.alpha * sums[static_cast<std::size_t>(j)];
        if (options.bias.defined()) value += options.bias.as<double>()[j * options.bias.strides[0]];
        double& out = py[j * y.strides[column]];
        out = options.accumulate ? out + value : value;
      }
    }
  });
}

}  // namespace cairn::kernels
