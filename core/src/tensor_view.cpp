#include "cairn/core/tensor_view.h"

#include <algorithm>
#include <optional>

namespace cairn::core {

namespace {

// Strides that show the elements of (shape, strides) in row-major order under new_shape, if memory
// allows.
std::optional<Strides> strides_of_reshape(const Shape& shape, const Strides& strides,
                                          const Shape& new_shape) {
  Strides result = contiguous_strides(new_shape);
  if (shape.numel() == 0) return result;
  Shape sizes, steps;  // without dimensions of size 1, which any stride fits
  for (int i = 0; i < shape.dims(); ++i) {
    if (shape[i] == 1) continue;
    sizes.push_back(shape[i]);
    steps.push_back(strides[i]);
  }
  int to = new_shape.dims() - 1;
  for (int from = sizes.dims() - 1; from >= 0;) {
    const std::int64_t step = steps[from];
    // How many elements, `step` apart, the dimensions hold that merge with this one.
    std::int64_t run = sizes[from];
    for (--from; from >= 0 && steps[from] == run * step; --from) run *= sizes[from];
    std::int64_t filled = 1;
    for (; to >= 0 && filled < run; --to) {
      result[to] = filled * step;
      filled *= new_shape[to];
    }
    if (filled != run) return std::nullopt;
  }
  return result;
}

Shape resolve_shape(const Shape& asked, std::int64_t numel) {
  Shape shape = asked;
  int inferred = -1;
  std::int64_t known = 1;
  for (int i = 0; i < shape.dims(); ++i) {
    if (shape[i] == -1) {
      CAIRN_CHECK(inferred < 0, "reshape", "expected at most one size of -1, got ", asked);
      inferred = i;
    } else {
      CAIRN_CHECK(shape[i] >= 0, "reshape", "expected sizes >= 0 or one -1, got ", asked);
      known *= shape[i];
    }
  }
  if (inferred >= 0) {
    CAIRN_CHECK(known > 0 && numel % known == 0, "reshape", "expected a shape of ", numel,
                " elements, got ", asked);
    shape[inferred] = numel / known;
  }
  CAIRN_CHECK(shape.numel() == numel, "reshape", "expected a shape of ", numel, " elements, got ",
              asked);
  return shape;
}

// Whether the dimensions, innermost first, tile memory without gap or repeat.
bool tiles(const Shape& shape, const Strides& strides, const Shape& innermost_first) {
  std::int64_t expected = 1;
  for (std::int64_t dim : innermost_first) {
    const int d = static_cast<int>(dim);
    if (shape[d] == 1) continue;
    if (strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

}  // namespace

bool TensorView::is_contiguous() const {
  Shape order;
  for (int i = dims() - 1; i >= 0; --i) order.push_back(i);
  return numel() == 0 || tiles(shape, strides, order);
}

bool TensorView::is_channels_last() const {
  return dims() == 4 && (numel() == 0 || tiles(shape, strides, {1, 3, 2, 0}));
}

bool TensorView::is_dense() const {
  if (numel() == 0) return true;
  Shape order;
  for (int i = 0; i < dims(); ++i) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return strides[static_cast<int>(a)] < strides[static_cast<int>(b)];
  });
  return tiles(shape, strides, order);
}

bool TensorView::can_reshape(const Shape& new_shape) const {
  return strides_of_reshape(shape, strides, resolve_shape(new_shape, numel())).has_value();
}

TensorView TensorView::reshape(const Shape& new_shape) const {
  const Shape resolved = resolve_shape(new_shape, numel());
  const std::optional<Strides> new_strides = strides_of_reshape(shape, strides, resolved);
  CAIRN_CHECK(new_strides.has_value(), "reshape", "expected a shape that ", shape, " with strides ",
              strides, " can take without a copy, got ", new_shape, " (copy it first)");
  TensorView result = *this;
  result.shape = resolved;
  result.strides = *new_strides;
  return result;
}

TensorView TensorView::expand(const Shape& new_shape) const {
  const int skip = new_shape.dims() - dims();
  CAIRN_CHECK(skip >= 0, "expand", "expected at least ", dims(), " dimensions, got ", new_shape);
  Strides new_strides = Shape::filled(new_shape.dims(), 0);
  for (int i = 0; i < dims(); ++i) {
    const std::int64_t size = new_shape[skip + i];
    CAIRN_CHECK(size == shape[i] || shape[i] == 1, "expand", "expected a shape that ", shape,
                " broadcasts to, got ", new_shape);
    new_strides[skip + i] = size == shape[i] ? strides[i] : 0;
  }
  TensorView result = *this;
  result.shape = new_shape;
  result.strides = new_strides;
  return result;
}

TensorView TensorView::transpose(int dim0, int dim1) const {
  TensorView result = *this;
  const int a = wrap_dim(dim0, dims(), "transpose");
  const int b = wrap_dim(dim1, dims(), "transpose");
  std::swap(result.shape[a], result.shape[b]);
  std::swap(result.strides[a], result.strides[b]);
  return result;
}

TensorView TensorView::permute(const Shape& order) const {
  CAIRN_CHECK(order.dims() == dims(), "permute", "expected an order of ", dims(),
              " dimensions, got ", order);
  TensorView result = *this;
  std::array<bool, kMaxDims> seen{};
  for (int i = 0; i < dims(); ++i) {
    const int from = wrap_dim(static_cast<int>(order[i]), dims(), "permute");
    bool& taken = seen[static_cast<std::size_t>(from)];
    CAIRN_CHECK(!taken, "permute", "expected each dimension once, got ", order);
    taken = true;
    result.shape[i] = shape[from];
    result.strides[i] = strides[from];
  }
  return result;
}

TensorView TensorView::slice(int dim, std::int64_t begin, std::int64_t end) const {
  const int d = wrap_dim(dim, dims(), "slice");
  CAIRN_CHECK(begin >= 0 && begin <= end && end <= shape[d], "slice",
              "expected 0 <= begin <= end <= ", shape[d], " in dimension ", d, " of ", shape,
              ", got [", begin, ", ", end, ")");
  TensorView result = *this;
  result.shape[d] = end - begin;
  if (data != nullptr) {
    result.data = as<char>() + begin * strides[d] * static_cast<std::int64_t>(size_of(dtype));
  }
  return result;
}

TensorView TensorView::select(int dim, std::int64_t index) const {
  const int d = wrap_dim(dim, dims(), "select");
  CAIRN_CHECK(index >= 0 && index < shape[d], "select", "expected an index from 0 to ",
              shape[d] - 1, " in dimension ", d, " of ", shape, ", got ", index);
  TensorView result = slice(d, index, index + 1);
  result.shape = {};
  result.strides = {};
  for (int i = 0; i < dims(); ++i) {
    if (i == d) continue;
    result.shape.push_back(shape[i]);
    result.strides.push_back(strides[i]);
  }
  return result;
}

TensorView TensorView::unsqueeze(int dim) const {
  const int d = wrap_dim(dim, dims() + 1, "unsqueeze");
  TensorView result = *this;
  result.shape = {};
  result.strides = {};
  for (int i = 0; i <= dims(); ++i) {
    if (i == d) {
      result.shape.push_back(1);
      result.strides.push_back(i < dims() ? shape[i] * strides[i] : 1);
    }
    if (i == dims()) break;
    result.shape.push_back(shape[i]);
    result.strides.push_back(strides[i]);
  }
  return result;
}

}  // namespace cairn::core
