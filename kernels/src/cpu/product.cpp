// Brings any strided operands into a form that oneDNN takes, where it can without a copy:
// transposes told as strides, repeats as broadcasts.
#include "cpu/product.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cairn/core/parallel_for.h"
#include "cpu/dnnl_operation.h"
#include "temporary.h"

namespace cairn::kernels {

namespace {

using onednn::Desc;
using onednn::Dims;

constexpr const char* kOp = "matmul";

std::optional<dnnl::algorithm> algorithm_of(Activation activation) {
  switch (activation) {
    case Activation::none:
      return std::nullopt;
    case Activation::relu:
      return dnnl::algorithm::eltwise_relu;
    case Activation::gelu_tanh:
      return dnnl::algorithm::eltwise_gelu_tanh;
    case Activation::gelu:
      return dnnl::algorithm::eltwise_gelu_erf;
  }
  return std::nullopt;
}

// bias [N] as oneDNN wants it: as many dimensions as y, 1 but for the last.
TensorView as_row(const TensorView& bias, int dims) {
  Shape shape = Shape::filled(dims, 1);
  shape[dims - 1] = bias.size(0);
  return {bias.data, shape, bias.dtype, bias.device};
}

// alpha before the sum and the bias, which it does not scale; then the epilogue.
dnnl::primitive_attr attributes_of(const MatmulOptions& options, const std::optional<Desc>& bias) {
  dnnl::post_ops ops;
  if (options.alpha != 1.0) {
    onednn::append_activation(ops, dnnl::algorithm::eltwise_linear,
                              static_cast<float>(options.alpha));
    if (bias) ops.append_binary(dnnl::algorithm::binary_add, *bias);
  }
  if (options.accumulate) ops.append_sum(1.0f);
  if (const auto algorithm = algorithm_of(options.activation)) {
    onednn::append_activation(ops, *algorithm);
  }
  dnnl::primitive_attr attr = onednn::attributes();
  attr.set_post_ops(ops);
  return attr;
}

int bias_argument(const MatmulOptions& options) {
  return options.alpha == 1.0 ? DNNL_ARG_BIAS : DNNL_ARG_ATTR_MULTIPLE_POST_OP(1) | DNNL_ARG_SRC_1;
}

// As b lies, or as the primitive likes it best.
Desc weights_desc(const TensorView& b, bool packed) {
  if (!packed) return onednn::desc(b);
  return Desc(Dims(b.shape.begin(), b.shape.end()), onednn::data_type(b.dtype),
              dnnl::memory::format_tag::any);
}

onednn::Operation make_product(const MatmulOperands& m, const MatmulOptions& options,
                               const Desc& weights) {
  const Desc a = onednn::desc(m.a), y = onednn::desc(m.y);
  std::optional<Desc> bias;
  if (options.bias.defined()) bias = onednn::desc(as_row(options.bias, m.y.dims()));
  const bool native_bias = bias && options.alpha == 1.0;
  const auto pd = onednn::matmul_desc(a, weights, native_bias ? &*bias : nullptr, y,
                                      attributes_of(options, bias), onednn::engine());
  onednn::Operation operation{
      dnnl::matmul(pd),
      {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, pd.weights_desc()}, {DNNL_ARG_DST, y}},
      pd.scratchpad_desc(),
      onednn::is_reference(pd)};
  if (bias) operation.arguments.emplace_back(bias_argument(options), *bias);
  return operation;
}

onednn::Key key_of(const char* kind, const MatmulOperands& settled, const MatmulOptions& options,
                   int threads) {
  return onednn::Key(kind, threads)
      .add(settled.a)
      .add(settled.b)
      .add(settled.y)
      .add(options.bias)
      .add(options.alpha)
      .add(std::int64_t{options.accumulate})
      .add(static_cast<std::int64_t>(options.activation));
}

onednn::OperationPtr product_operation(const MatmulOperands& m, const MatmulOptions& options,
                                       int threads, bool packed) {
  const MatmulOperands settled = for_onednn(m);
  return onednn::cached(
      key_of(packed ? "matmul_packed" : "matmul", settled, options, threads),
      [&] { return make_product(settled, options, weights_desc(settled.b, packed)); });
}

void execute_product(const onednn::Operation& operation, const MatmulOperands& m,
                     const MatmulOptions& options) {
  onednn::execute(kOp, operation, m.y.device,
                  {{DNNL_ARG_SRC, m.a.data},
                   {DNNL_ARG_WEIGHTS, m.b.data},
                   {DNNL_ARG_DST, m.y.data},
                   {bias_argument(options), options.bias.data}});
}

// Of operands that oneDNN takes as they are; bias dense. Batches that are not packed (views of a
// fused projection) are spread over the threads, one matrix at a time: oneDNN's batched product is
// slow or a reference loop for them.
void multiply_plain(const MatmulOperands& m, const MatmulOptions& options) {
  const std::int64_t count = matrix_count(m.y);
  const int threads = onednn::threads_for(m.y.numel() * m.a.size(-1));
  if (count == 1 || is_packed(m)) {
    execute_product(*product_operation(m, options, threads, false), m, options);
    return;
  }
  const bool spread = threads > 1 && count >= threads;
  const auto operation = product_operation(matrix_at(m, 0), options, spread ? 1 : threads, false);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      execute_product(*operation, matrix_at(m, i), options);
  };
  core::parallel_for(count, spread ? 1 : count, run);
}

// The plain layout that a copy of an operand gets, without memory: its columns stay together where
// they are, its repeats are not multiplied out.
TensorView plain_layout(const TensorView& view, DType dtype) {
  TensorView once = view;
  for (int i = 0; i < view.dims() - 2; ++i) {
    if (view.strides[i] == 0) once.shape[i] = 1;
  }
  const bool by_columns = view.strides[view.dims() - 2] == 1 && view.size(-1) > 1;
  if (!by_columns) return {nullptr, once.shape, dtype, view.device};
  return TensorView(nullptr, once.transpose(-2, -1).shape, dtype, view.device).transpose(-2, -1);
}

Temporary plain_copy(const Backend& backend, const TensorView& view, DType dtype) {
  const TensorView layout = plain_layout(view, dtype);
  Temporary copy = temporary(layout.shape, layout.strides, dtype, view.device);
  TensorView once = view;
  once.shape = layout.shape;
  const bool by_columns = layout.strides[view.dims() - 1] != 1;
  backend.copy(by_columns ? once.transpose(-2, -1) : once,
               by_columns ? copy.view.transpose(-2, -1) : copy.view);
  copy.view = copy.view.expand(view.shape);
  return copy;
}

Temporary operand(const Backend& backend, const TensorView& view, DType dtype) {
  if (view.dtype == dtype && is_plain_matrix(view)) return {Tensor(), view};
  return plain_copy(backend, view, dtype);
}

Temporary bias_operand(const Backend& backend, const TensorView& bias, DType compute) {
  if (!bias.defined()) return {};
  const bool taken = bias.dtype == DType::f32 || bias.dtype == compute;
  if (taken && bias.is_contiguous()) return {Tensor(), bias};
  Temporary copy = temporary(bias.shape, DType::f32, bias.device);
  backend.copy(bias, copy.view);
  return copy;
}

// b in the layout of operation, whatever its dtype; both are single matrices.
Temporary packed_operand(const Backend& backend, const TensorView& b, DType compute,
                         const onednn::Operation& operation) {
  const bool readable = onednn::reads(b.dtype) && is_plain_matrix(b);
  const Temporary given = readable ? Temporary{Tensor(), b} : plain_copy(backend, b, compute);
  const TensorView settled = for_onednn({given.view, given.view, given.view}).b;
  return onednn::reordered(kOp, given, onednn::desc(settled), operation.argument(DNNL_ARG_WEIGHTS));
}

// Whether oneDNN can write y: row-major, in the dtype computed in or f32.
bool is_direct(const TensorView& y, DType compute) {
  return y.strides[y.dims() - 1] == 1 && is_plain_matrix(y) &&
         (y.dtype == compute || y.dtype == DType::f32);
}

// y, or room for an f32 sum in its stead.
class Output {
 public:
  Output(const TensorView& y, DType compute, MatmulOptions& options) : y_(y) {
    if (is_direct(y, compute)) return;
    sum_ = temporary(y.shape, DType::f32, y.device);
    accumulate_ = std::exchange(options.accumulate, false);
  }
  const TensorView& view() const { return sum_.owner.defined() ? sum_.view : y_; }
  void finish(const Backend& backend) const {
    if (!sum_.owner.defined()) return;
    if (accumulate_) {
      backend.axpby(1.0, sum_.view, 1.0, y_);
    } else {
      backend.copy(sum_.view, y_);
    }
  }

 private:
  TensorView y_;
  Temporary sum_;
  bool accumulate_ = false;
};

void multiply_whole(const Backend& backend, const MatmulOperands& m, MatmulOptions options,
                    DType compute) {
  const Temporary a = operand(backend, m.a, compute), b = operand(backend, m.b, compute);
  const Output y(m.y, compute, options);
  multiply_plain({a.view, b.view, y.view()}, options);
  y.finish(backend);
}

// With b in the layout that the primitive likes. False, and nothing done, where oneDNN has none but
// a reference loop for that.
bool multiply_packed(const Backend& backend, const MatmulOperands& m, MatmulOptions options,
                     DType compute) {
  const Temporary a = operand(backend, m.a, compute);
  const Output y(m.y, compute, options);
  const int threads = onednn::threads_for(m.y.numel() * m.a.size(1));
  const TensorView layout = plain_layout(m.b, compute);
  const auto operation = product_operation({a.view, layout, y.view()}, options, threads, true);
  if (operation->reference) return false;
  const Temporary b = packed_operand(backend, m.b, compute, *operation);
  execute_product(*operation, {a.view, b.view, y.view()}, options);
  y.finish(backend);
  return true;
}

// Rows of a block: what is widened and summed of them about fits a core's second cache. Those of a
// transposed a are runs of so many elements, which should not be short.
std::int64_t block_rows(const MatmulOperands& m) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 20, kStep = 32, kMost = 512;
  const std::int64_t least = m.a.strides[1] == 1 ? kStep : 256;
  const std::int64_t bytes_per_row = 4 * (m.a.size(1) + m.y.size(1));
  const std::int64_t most = std::clamp(kBytes / bytes_per_row, least, kMost);
  const std::int64_t rows = m.y.size(0), blocks = (rows + most - 1) / most;
  return std::min(rows, (rows + blocks * kStep - 1) / (blocks * kStep) * kStep);  // of one size
}

MatmulOperands rows_of(const MatmulOperands& m, std::int64_t begin, std::int64_t end) {
  return {m.a.slice(0, begin, end), m.b, m.y.slice(0, begin, end)};
}

// The primitive for some rows, of one thread. b in the layout of `like`, where there is one.
onednn::OperationPtr block_operation(const MatmulOperands& m, MatmulOptions options,
                                     const onednn::Operation* like) {
  const bool direct = is_direct(m.y, DType::f32);
  if (!direct) options.accumulate = false;
  const MatmulOperands settled =
      for_onednn({plain_layout(m.a, DType::f32), plain_layout(m.b, DType::f32),
                  direct ? m.y : TensorView(nullptr, m.y.shape, DType::f32, m.y.device)});
  const Desc weights = like ? like->argument(DNNL_ARG_WEIGHTS) : weights_desc(settled.b, true);
  return onednn::cached(key_of("matmul_block", settled, options, 1).add(weights),
                        [&] { return make_product(settled, options, weights); });
}

// Some rows, by one thread; b is packed.
void multiply_block(const Backend& backend, const MatmulOperands& m, MatmulOptions options,
                    const onednn::Operation& operation) {
  const Temporary a = plain_copy(backend, m.a, DType::f32);
  const Output y(m.y, DType::f32, options);
  execute_product(operation, {a.view, m.b, y.view()}, options);
  y.finish(backend);
}

// Halves through f32 in blocks of rows: each is widened, multiplied and rounded by one thread while
// it lies in the caches; b, widened and packed once, serves all. False, and nothing done, where
// oneDNN has but a reference loop.
bool multiply_in_blocks(const Backend& backend, const MatmulOperands& m,
                        const MatmulOptions& options, std::int64_t rows) {
  const std::int64_t all = m.y.size(0), rest = all % rows;
  const auto whole = block_operation(rows_of(m, 0, rows), options, nullptr);
  const auto last =
      rest == 0 ? whole : block_operation(rows_of(m, all - rest, all), options, whole.get());
  if (whole->reference || last->reference) return false;
  const Temporary packed = packed_operand(backend, m.b, DType::f32, *whole);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    MatmulOperands part = rows_of(m, begin, end);
    part.b.data = packed.view.data;
    multiply_block(backend, part, options, end - begin == rows ? *whole : *last);
  };
  core::parallel_for(all, rows, run);
  return true;
}

bool multiply_on_packed(const Backend& backend, const MatmulOperands& m,
                        const MatmulOptions& options, const Route& route) {
  if (!route.packed || matrix_count(m.y) > 1) return false;
  const int threads = onednn::threads_for(m.y.numel() * m.a.size(1));
  const std::int64_t rows = block_rows(m);
  const bool widened = core::is_half(m.a.dtype) && route.compute == DType::f32;
  if (widened && m.y.size(0) > (threads - 1) * rows) {  // a block or more for each thread
    return multiply_in_blocks(backend, m, options, rows);
  }
  return multiply_packed(backend, m, options, route.compute);
}

// Columns of b that are packed at once: so many that a's share of the work stays small, and, of an
// output layer's b, not more.
std::int64_t panel_columns(const MatmulOperands& m, const Route& route) {
  const std::int64_t all = m.y.size(-1);
  if (!route.packed || matrix_count(m.y) > 1) return all;
  constexpr std::int64_t kBytes = std::int64_t{16} << 20, kStep = 64, kLeast = 1024;
  const auto column = static_cast<std::int64_t>(size_of(route.compute)) * m.a.size(-1);
  const std::int64_t most = std::max(kBytes / column, kLeast), panels = (all + most - 1) / most;
  return (all + panels * kStep - 1) / (panels * kStep) * kStep;  // of about one size
}

}  // namespace

void multiply(const Backend& backend, const MatmulOperands& m, const MatmulOptions& options,
              const Route& route) {
  const Temporary bias = bias_operand(backend, options.bias, route.compute);
  const std::int64_t columns = m.y.size(-1), step = panel_columns(m, route);
  for (std::int64_t begin = 0; begin < columns; begin += step) {
    const std::int64_t end = std::min(columns, begin + step);
    const MatmulOperands panel{m.a, m.b.slice(-1, begin, end), m.y.slice(-1, begin, end)};
    MatmulOptions plain = options;
    plain.bias = bias.view.defined() ? bias.view.slice(0, begin, end) : TensorView();
    if (multiply_on_packed(backend, panel, plain, route)) continue;
    multiply_whole(backend, panel, plain, route.compute);
  }
}

}  // namespace cairn::kernels
