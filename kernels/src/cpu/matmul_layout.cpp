#include "cpu/matmul_layout.h"

#include <algorithm>
#include <vector>

namespace cairn::kernels {

namespace {

struct BatchDim {
  std::int64_t size, a, b, y;  // and the strides of the three operands
};

// Whether the outer dimension continues the inner one in memory.
bool continues(const BatchDim& outer, const BatchDim& inner) {
  return outer.a == inner.a * inner.size && outer.b == inner.b * inner.size &&
         outer.y == inner.y * inner.size;
}

std::vector<BatchDim> batch_dims(const MatmulOperands& m) {
  std::vector<BatchDim> dims;
  for (int i = 0; i < m.y.dims() - 2; ++i) {
    const BatchDim dim{m.y.shape[i], m.a.strides[i], m.b.strides[i], m.y.strides[i]};
    if (dim.size == 1) continue;
    if (!dims.empty() && continues(dims.back(), dim)) {
      const std::int64_t outer = dims.back().size;
      dims.back() = dim;
      dims.back().size *= outer;
    } else {
      dims.push_back(dim);
    }
  }
  return dims;
}

// A matrix of rows x columns at the end of the given leading dimensions.
TensorView batched(const TensorView& matrix, const std::vector<BatchDim>& dims,
                   std::int64_t BatchDim::*stride) {
  TensorView view{matrix.data, Shape(), Strides(), matrix.dtype, matrix.device};
  for (const BatchDim& dim : dims) {
    view.shape.push_back(dim.size);
    view.strides.push_back(dim.*stride);
  }
  for (int i = matrix.dims() - 2; i < matrix.dims(); ++i) {
    view.shape.push_back(matrix.shape[i]);
    view.strides.push_back(matrix.strides[i]);
  }
  return view;
}

// Makes the innermost leading dimension more rows of a and y, where b repeats over it and memory
// allows.
bool fold_into_rows(MatmulOperands& m, std::vector<BatchDim>& dims) {
  if (dims.empty() || dims.back().b != 0) return false;
  const BatchDim& dim = dims.back();
  const int row_a = m.a.dims() - 2, row_y = m.y.dims() - 2;
  const std::int64_t rows = m.y.shape[row_y];
  if (rows == 1) {
    m.a.strides[row_a] = dim.a;
    m.y.strides[row_y] = dim.y;
  } else if (dim.a != m.a.strides[row_a] * rows || dim.y != m.y.strides[row_y] * rows) {
    return false;
  }
  m.a.shape[row_a] = m.y.shape[row_y] = rows * dim.size;
  dims.pop_back();
  return true;
}

// Strides of dimensions of size 1 mean nothing to memory, but oneDNN reads the layout from them.
void settle_strides(TensorView& view) {
  const int row = view.dims() - 2, column = view.dims() - 1;
  if (view.shape[column] == 1) view.strides[column] = 1;
  if (view.shape[row] == 1) {
    view.strides[row] =
        view.strides[column] == 1 ? std::max<std::int64_t>(view.shape[column], 1) : 1;
  }
  std::int64_t extent =
      std::max(view.shape[row] * view.strides[row], view.shape[column] * view.strides[column]);
  for (int i = row - 1; i >= 0; --i) {
    if (view.strides[i] == 0 || view.shape[i] == 1) {
      view.shape[i] = 1;
      view.strides[i] = extent;
    }
    extent = std::max(extent, view.shape[i] * view.strides[i]);
  }
}

}  // namespace

bool is_plain_matrix(const TensorView& view) {
  TensorView settled = view;
  settle_strides(settled);
  const std::int64_t rows = settled.size(-2), columns = settled.size(-1);
  const std::int64_t by_row = settled.strides[view.dims() - 2];
  const std::int64_t by_column = settled.strides[view.dims() - 1];
  return (by_column == 1 && by_row >= columns) || (by_row == 1 && by_column >= rows);
}

MatmulOperands merge_batches(const MatmulOperands& operands) {
  MatmulOperands m = operands;
  std::vector<BatchDim> dims = batch_dims(m);
  while (fold_into_rows(m, dims)) {
  }
  return {batched(m.a, dims, &BatchDim::a), batched(m.b, dims, &BatchDim::b),
          batched(m.y, dims, &BatchDim::y)};
}

MatmulOperands for_onednn(const MatmulOperands& operands) {
  MatmulOperands m = operands;
  settle_strides(m.a);
  settle_strides(m.b);
  settle_strides(m.y);
  return m;
}

bool is_packed(const MatmulOperands& m) {
  if (m.y.dims() > 3) return false;
  for (const TensorView* view : {&m.a, &m.b, &m.y}) {
    if (!view->is_dense()) return false;
    if (view->dims() == 3 && view->strides[0] != view->size(1) * view->size(2)) return false;
  }
  return true;
}

std::int64_t matrix_count(const TensorView& view) {
  std::int64_t count = 1;
  for (int i = 0; i < view.dims() - 2; ++i) count *= view.shape[i];
  return count;
}

std::int64_t matrix_offset(const TensorView& view, std::int64_t index) {
  std::int64_t offset = 0;
  for (int i = view.dims() - 3; i >= 0; --i) {
    offset += index % view.shape[i] * view.strides[i];
    index /= view.shape[i];
  }
  return offset;
}

MatmulOperands matrix_at(const MatmulOperands& operands, std::int64_t index) {
  const auto matrix = [index](const TensorView& view) {
    const int row = view.dims() - 2, column = view.dims() - 1;
    const auto bytes = matrix_offset(view, index) * static_cast<std::int64_t>(size_of(view.dtype));
    return TensorView(static_cast<char*>(view.data) + bytes, {view.shape[row], view.shape[column]},
                      Strides{view.strides[row], view.strides[column]}, view.dtype, view.device);
  };
  return {matrix(operands.a), matrix(operands.b), matrix(operands.y)};
}

}  // namespace cairn::kernels
