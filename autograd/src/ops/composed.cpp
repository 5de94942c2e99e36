// Operations that are made of others.
#include <algorithm>
#include <numeric>
#include <string>

#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "ops/common.h"

namespace cairn::autograd {

namespace {

/// f in f32, where x is of less, as one operation would be.
template <class F>
Tensor widened_through(const Tensor& x, F&& f) {
  return core::is_half(x.dtype()) ? to(f(to(x, DType::f32)), x.dtype()) : f(x);
}

Tensor scalar_like(const Tensor& x, double value) {
  return Tensor::full({}, value, x.dtype(), x.device());
}

/// Where column - row <= diagonal.
Tensor lower_mask(const Tensor& x, std::int64_t diagonal, const char* op) {
  CAIRN_CHECK(x.dims() >= 2, op, "expected [..., M, N], got ", x.shape());
  const std::int64_t rows = x.size(-2), columns = x.size(-1);
  const Tensor row = arange(0, rows, DType::i64, x.device()),
               column = arange(-diagonal, columns - diagonal, DType::i64, x.device());
  return le(reshape(column, {1, columns}), reshape(row, {rows, 1}));
}

}  // namespace

Tensor elu(const Tensor& x, double alpha) {
  return widened_through(x, [&](const Tensor& wide) {
    return where(gt(wide, scalar_like(wide, 0)), wide, affine(exp(wide), alpha, -alpha));
  });
}

Tensor prelu(const Tensor& x, const Tensor& weight) {
  return where(gt(x, scalar_like(x, 0)), x, mul(x, weight));
}

Tensor softplus(const Tensor& x) {
  constexpr double kAsItIs = 20;  // above, exp(-x) is beyond what f32 adds
  return widened_through(x, [&](const Tensor& wide) {
    return where(gt(wide, scalar_like(wide, kAsItIs)), wide, log(affine(exp(wide), 1, 1)));
  });
}

Tensor mish(const Tensor& x) {
  return widened_through(x, [](const Tensor& wide) { return mul(wide, tanh(softplus(wide))); });
}

Tensor min(const Tensor& x, const std::vector<int>& dims, bool keep_dims) {
  return neg(max(neg(x), dims, keep_dims));
}

Tensor var(const Tensor& x, const std::vector<int>& dims, bool keep_dims, double correction) {
  double count = 1;
  for (const int dim : wrap_dims(dims, x.dims(), "var")) count *= static_cast<double>(x.size(dim));
  CAIRN_CHECK(count > correction, "var", "expected more than ", correction, " values, got ", count,
              " in ", x.shape());
  const Tensor squares = square(sub(x, mean(x, dims, true)));
  return affine(sum(squares, dims, keep_dims), 1 / (count - correction), 0);
}

Tensor norm(const Tensor& x, const std::vector<int>& dims, bool keep_dims) {
  return widened_through(x, [&](const Tensor& wide) {
    const Tensor squares = sum(square(wide), dims, keep_dims);
    const Tensor zero = scalar_like(squares, 0), some = gt(squares, zero);
    return where(some, sqrt(where(some, squares, scalar_like(squares, 1))), squares);
  });
}

TopK sort(const Tensor& x, bool descending) {
  CAIRN_CHECK(x.dims() >= 1, "sort", "expected [..., V], got a scalar");
  return topk(x, x.size(-1), descending);
}

Tensor arange(std::int64_t begin, std::int64_t end, DType dtype, Device device) {
  CAIRN_CHECK(begin <= end, "arange", "expected begin <= end, got ", begin, " and ", end);
  std::vector<std::int64_t> values;
  for (std::int64_t value = begin; value < end; ++value) values.push_back(value);
  return Tensor::from(values, {end - begin}, dtype, device);
}

Tensor randn(const Shape& shape, DType dtype, Device device) {
  const Tensor drawn = Tensor::empty(shape, DType::f32, Device{});
  core::Generator::current().fill_normal(drawn, 0, 1);
  Tensor x = Tensor::empty(shape, dtype, device);
  kernels::copy(drawn, x);
  return x;
}

Tensor one_hot(const Tensor& index, std::int64_t classes, DType dtype) {
  return to(eq(unsqueeze(index, -1), arange(0, classes, index.dtype(), index.device())), dtype);
}

Tensor tril(const Tensor& x, std::int64_t diagonal) {
  return where(lower_mask(x, diagonal, "tril"), x, scalar_like(x, 0));
}

Tensor triu(const Tensor& x, std::int64_t diagonal) {
  return where(lower_mask(x, diagonal - 1, "triu"), scalar_like(x, 0), x);
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, double value) {
  return where(mask, scalar_like(x, value), x);
}

Tensor squeeze(const Tensor& x, int dim) {
  const int at = core::wrap_dim(dim, x.dims(), "squeeze");
  CAIRN_CHECK(x.size(at) == 1, "squeeze", "expected size 1 in dimension ", dim, ", got ",
              x.shape());
  return select(x, at, 0);
}

Tensor unsqueeze(const Tensor& x, int dim) {
  const int at = core::wrap_dim(dim, x.dims() + 1, "unsqueeze");
  Shape shape;
  for (int d = 0; d <= x.dims(); ++d) {
    if (d == at) shape.push_back(1);
    if (d < x.dims()) shape.push_back(x.size(d));
  }
  return reshape(x, shape);
}

std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim) {
  CAIRN_CHECK(size > 0, "split", "expected a size > 0, got ", size);
  std::vector<Tensor> parts;
  const std::int64_t all = x.size(dim);
  for (std::int64_t begin = 0; begin < all; begin += size)
    parts.push_back(slice(x, dim, begin, std::min(all, begin + size)));
  return parts;
}

Tensor index_select(const Tensor& x, int dim, const Tensor& index) {
  const int at = core::wrap_dim(dim, x.dims(), "index_select");
  CAIRN_CHECK(index.defined() && index.dims() == 1, "index_select", "expected an index [K], got ",
              index.defined() ? core::str(index.shape()) : "none");
  const Tensor first = transpose(x, 0, at);
  Shape shape = first.shape();
  const std::int64_t width = Shape(shape.begin() + 1, shape.end()).numel();
  const Tensor rows = embedding(reshape(first, {shape[0], width}), index);
  shape[0] = index.numel();
  return transpose(reshape(rows, shape), 0, at);
}

Tensor flip(const Tensor& x, int dim) {
  std::vector<std::int64_t> backwards(static_cast<std::size_t>(x.size(dim)));
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  return index_select(x, dim, Tensor::from(backwards, {x.size(dim)}, DType::i64, x.device()));
}

Tensor pad(const Tensor& x, int dim, std::int64_t before, std::int64_t behind, double value) {
  CAIRN_CHECK(before >= 0 && behind >= 0, "pad", "expected counts of 0 or more, got ", before,
              " and ", behind);
  const auto filled = [&](std::int64_t count) {
    Shape shape = x.shape();
    shape[core::wrap_dim(dim, x.dims(), "pad")] = count;
    return Tensor::full(shape, value, x.dtype(), x.device());
  };
  std::vector<Tensor> parts{x};
  if (before > 0) parts.insert(parts.begin(), filled(before));
  if (behind > 0) parts.push_back(filled(behind));
  return parts.size() == 1 ? x : concat(parts, dim);
}

// ---- einsum

namespace {

struct Formula {
  std::vector<std::string> inputs;
  std::string output;
};

[[noreturn]] void refuse(std::string_view formula, const std::string& why) {
  core::fail("einsum", "expected a formula as 'bij,bjk->bik', got '", formula, "': ", why);
}

Formula parse(std::string_view text) {
  Formula formula{{""}, ""};
  const std::size_t arrow = text.find("->");
  if (arrow == std::string_view::npos) refuse(text, "it names no result (->)");
  for (const char letter : text.substr(0, arrow)) {
    if (letter == ',') {
      formula.inputs.emplace_back();
    } else {
      formula.inputs.back() += letter;
    }
  }
  formula.output = text.substr(arrow + 2);
  std::vector<std::string> all = formula.inputs;
  all.push_back(formula.output);
  for (const std::string& letters : all) {
    for (const char letter : letters) {
      if (letter < 'a' || letter > 'z') refuse(text, core::str("it has '", letter, "'"));
      if (std::count(letters.begin(), letters.end(), letter) > 1)
        refuse(text, core::str("'", letter, "' comes twice in one tensor"));
    }
  }
  for (const char letter : formula.output) {
    const bool known =
        std::any_of(formula.inputs.begin(), formula.inputs.end(),
                    [&](const auto& in) { return in.find(letter) != std::string::npos; });
    if (!known) refuse(text, core::str("no tensor has the result's '", letter, "'"));
  }
  return formula;
}

/// A tensor, and the letter of each of its dimensions.
struct Lettered {
  Tensor x;
  std::string letters;

  bool has(char letter) const { return letters.find(letter) != std::string::npos; }
  std::int64_t size(char letter) const { return x.size(static_cast<int>(letters.find(letter))); }
  /// Summed over the letters that are in neither of these.
  Lettered summed_to(const std::string& kept, const std::string& too) const {
    std::vector<int> dims;
    std::string rest;
    for (std::size_t i = 0; i < letters.size(); ++i) {
      const bool stays = (kept + too).find(letters[i]) != std::string::npos;
      if (stays) rest += letters[i];
      if (!stays) dims.push_back(static_cast<int>(i));
    }
    return {dims.empty() ? x : sum(x, dims), rest};
  }
  Tensor in_order(const std::string& order) const {
    Shape places;
    for (const char letter : order)
      places.push_back(static_cast<std::int64_t>(letters.find(letter)));
    return order == letters ? x : permute(x, places);
  }
};

std::int64_t elements(const Lettered& of, const std::string& letters) {
  std::int64_t count = 1;
  for (const char letter : letters) count *= of.size(letter);
  return count;
}

/// One product: letters of both that the result has are its batch, those that it has not its inner
/// dimension.
Lettered product(const Lettered& a, const Lettered& b, const std::string& output) {
  std::string batch, inner, rows, columns;
  for (const char letter : a.letters) {
    if (!b.has(letter)) {
      rows += letter;
    } else {
      (output.find(letter) != std::string::npos ? batch : inner) += letter;
    }
  }
  for (const char letter : b.letters) {
    if (!a.has(letter)) columns += letter;
  }
  const std::int64_t B = elements(a, batch), M = elements(a, rows), K = elements(a, inner),
                     N = elements(b, columns);
  const Tensor y = matmul(reshape(a.in_order(batch + rows + inner), {B, M, K}),
                          reshape(b.in_order(batch + inner + columns), {B, K, N}));
  Shape shape;
  for (const char letter : batch + rows) shape.push_back(a.size(letter));
  for (const char letter : columns) shape.push_back(b.size(letter));
  return {reshape(y, shape), batch + rows + columns};
}

}  // namespace

Tensor einsum(std::string_view text, const std::vector<Tensor>& xs) {
  const Formula formula = parse(text);
  if (formula.inputs.size() != xs.size() || xs.size() > 2)
    refuse(text, core::str("it is of ", formula.inputs.size(), " tensors, not of the ", xs.size(),
                           " given (one or two)"));
  std::vector<Lettered> all;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    if (static_cast<std::size_t>(xs[i].dims()) != formula.inputs[i].size())
      refuse(text, core::str("'", formula.inputs[i], "' is no name for ", xs[i].shape()));
    all.push_back({xs[i], formula.inputs[i]});
  }
  if (all.size() == 1) return all[0].summed_to(formula.output, "").in_order(formula.output);
  for (const char letter : all[0].letters) {
    if (all[1].has(letter) && all[0].size(letter) != all[1].size(letter))
      refuse(text,
             core::str("'", letter, "' is ", all[0].size(letter), " and ", all[1].size(letter)));
  }
  const Lettered a = all[0].summed_to(formula.output, all[1].letters),
                 b = all[1].summed_to(formula.output, all[0].letters);
  return product(a, b, formula.output).in_order(formula.output);
}

}  // namespace cairn::autograd
