#include "cuda/cublaslt/padded_product.h"

#include <algorithm>
#include <memory>
#include <optional>

namespace cairn::kernels::cuda {
namespace {

using View = const TensorView&;

constexpr std::int64_t kUnit = 8;  // halves in 16 bytes

std::int64_t whole_units(std::int64_t n) {
  return (n + kUnit - 1) / kUnit * kUnit;
}

/// The dimension in which neighbours lie side by side; -1 where there is none.
int inner_dimension(View x) {
  if (x.strides[1] == 1) return 1;
  return x.strides[0] == 1 ? 0 : -1;
}

bool has_unaligned_rows(View x) {
  if (!core::is_half(x.dtype)) return false;
  const int inner = inner_dimension(x);
  if (inner < 0 || x.size(1 - inner) == 1) return false;
  return x.strides[1 - inner] % kUnit != 0 || reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0;
}

struct Operands {
  TensorView a, b, y;
  MatmulOptions options;
};

/// Rows (dimension 0) or columns (1) [begin, end) of y, and of what has them too.
Operands part_of(const Operands& x, int dimension, std::int64_t begin, std::int64_t end) {
  const auto part = [&](View view) { return view.slice(dimension, begin, end); };
  Operands result = x;
  result.y = part(x.y);
  TensorView& operand = dimension == 0 ? result.a : result.b;
  operand = part(operand);
  MatmulOptions& options = result.options;
  if (options.pre_activation.defined()) options.pre_activation = part(options.pre_activation);
  if (dimension == 1 && options.bias.defined()) options.bias = options.bias.slice(0, begin, end);
  return result;
}

/// Memory for a matrix in the order of another, with rows that begin aligned; `longer` by what a
/// dimension lacks of whole units (-1: none).
class PaddedMatrix {
 public:
  PaddedMatrix(const Queue& queue, View like, int longer = -1) : size_(like.shape) {
    Shape sizes = like.shape;
    if (longer >= 0) sizes[longer] = whole_units(sizes[longer]);
    const int inner = inner_dimension(like);
    const std::int64_t row = whole_units(sizes[inner]);
    memory_ = queue.workspace(static_cast<std::size_t>(row * sizes[1 - inner]) *
                              core::size_of(like.dtype));
    Strides strides{row, row};
    strides[inner] = 1;
    view_ = TensorView(memory_->data(), sizes, strides, like.dtype, like.device);
  }
  View view() const { return view_; }

  /// Copies x, and zeros where this is longer.
  void take(const Backend& backend, View x) const {
    TensorView part = view_;
    for (int d = 0; d < 2; ++d) {
      if (view_.size(d) > size_[d]) backend.fill(view_.slice(d, size_[d], view_.size(d)), 0.0);
      part = part.slice(d, 0, size_[d]);
    }
    backend.copy(x, part);
  }

 private:
  Shape size_;
  std::shared_ptr<core::Storage> memory_;
  TensorView view_;
};

class PaddedProduct {
 public:
  /// `dimension` of y's pieces: 0, a's rows; 1, b's columns. `pads_depth`: a or b lies along k.
  PaddedProduct(const Backend& backend, const Queue& queue, const Multiply& multiply, int dimension,
                bool pads_depth, const Padding& padding)
      : backend_(backend),
        queue_(queue),
        multiply_(multiply),
        dimension_(dimension),
        pads_depth_(pads_depth),
        padding_(padding) {}

  void run(Operands x) const {
    const std::int64_t size = x.y.size(dimension_), step = step_of(x);
    std::optional<PaddedMatrix> every;  // what all pieces need
    if (pads_depth_) pad(dimension_ == 0 ? x.b : x.a, dimension_, every);
    for (std::int64_t begin = 0, end = 0; begin < size; begin = end) {
      end = std::min(begin + step, size);
      if (end - begin > kUnit) end -= (end - begin) % kUnit;  // the last few are slow by themselves
      multiply_piece(part_of(x, dimension_, begin, end));
    }
  }

 private:
  std::int64_t step_of(const Operands& x) const {
    View operand = dimension_ == 0 ? x.a : x.b;
    std::int64_t halves = 0;  // of a row, or a column, in the workspace
    if (pads_depth_ || has_unaligned_rows(operand)) halves += operand.size(1 - dimension_);
    if (has_unaligned_rows(x.y)) halves += x.y.size(1 - dimension_);
    const std::int64_t units = padding_.piece_bytes / (2 * halves) / padding_.piece_unit;
    return std::max<std::int64_t>(units, 1) * padding_.piece_unit;
  }

  void pad(TensorView& x, int longer, std::optional<PaddedMatrix>& padded) const {
    padded.emplace(queue_, x, longer);
    padded->take(backend_, x);
    x = padded->view();
  }

  void multiply_piece(Operands x) const {
    std::optional<PaddedMatrix> own;
    TensorView& operand = dimension_ == 0 ? x.a : x.b;
    if (pads_depth_ || has_unaligned_rows(operand))
      pad(operand, pads_depth_ ? 1 - dimension_ : -1, own);
    if (!has_unaligned_rows(x.y)) return call(x);
    const std::int64_t columns = x.y.size(1), whole = columns / kUnit * kUnit;
    if (whole > 0) multiply_into_padded(part_of(x, 1, 0, whole));
    if (whole < columns) call(part_of(x, 1, whole, columns));
  }

  void multiply_into_padded(Operands x) const {
    const TensorView y = x.y;
    const PaddedMatrix padded(queue_, y);
    if (x.options.accumulate) padded.take(backend_, y);
    x.y = padded.view();
    call(x);
    backend_.copy(x.y, y);
  }

  void call(const Operands& x) const { multiply_(x.a, x.b, x.y, x.options); }

  const Backend& backend_;
  const Queue& queue_;
  const Multiply& multiply_;
  int dimension_;
  bool pads_depth_;
  const Padding& padding_;
};

}  // namespace

bool multiply_padded(const Backend& backend, const Queue& queue, View a, View b, View y,
                     const MatmulOptions& options, const Multiply& multiply,
                     const Padding& padding) {
  if (a.dims() != 2 || b.dims() != 2 || y.dims() != 2) return false;
  const std::int64_t m = y.size(0), n = y.size(1), k = a.size(1);
  if (std::min({m, n, k}) < padding.least_uses ||
      static_cast<double>(m * n) * static_cast<double>(k) < padding.least_multiplications)
    return false;
  const bool of_a = has_unaligned_rows(a), of_b = has_unaligned_rows(b);
  if (!of_a && !of_b && !has_unaligned_rows(y)) return false;
  if (inner_dimension(a) < 0 || inner_dimension(b) < 0 || inner_dimension(y) < 0) return false;
  const bool rows_of_a = of_a && inner_dimension(a) == 0,
             columns_of_b = of_b && inner_dimension(b) == 1;
  if (rows_of_a && columns_of_b) return false;  // pieces of both kinds
  const bool pads_depth = (of_a && !rows_of_a) || (of_b && !columns_of_b);
  const PaddedProduct product(backend, queue, multiply, columns_of_b ? 1 : 0, pads_depth, padding);
  product.run({a, b, y, options});
  return true;
}

}  // namespace cairn::kernels::cuda
