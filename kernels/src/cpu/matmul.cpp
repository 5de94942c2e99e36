// Matrix products on oneDNN. The work here is to bring any strided operands into a form it takes
// without a copy: leading dimensions merged, transposes told as strides, repeats as broadcasts.
#include <optional>
#include <utility>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/dnnl_operation.h"
#include "cpu/matmul_layout.h"
#include "cpu/temporary.h"

namespace cairn::kernels {

void matmul_f64(const TensorView& a, const TensorView& b, const TensorView& y,
                const MatmulOptions& options);  // matmul_f64.cpp

namespace {

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
dnnl::primitive_attr attributes_of(const MatmulOptions& options,
                                   const std::optional<onednn::Desc>& bias) {
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

onednn::Operation make_product(const MatmulOperands& m, const MatmulOptions& options) {
  const onednn::Desc a = onednn::desc(m.a), b = onednn::desc(m.b), y = onednn::desc(m.y);
  std::optional<onednn::Desc> bias;
  if (options.bias.defined()) bias = onednn::desc(as_row(options.bias, m.y.dims()));
  const bool native_bias = bias && options.alpha == 1.0;
  const auto pd = onednn::matmul_desc(a, b, native_bias ? &*bias : nullptr, y,
                                      attributes_of(options, bias), onednn::engine());
  onednn::Operation operation{dnnl::matmul(pd),
                              {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, y}},
                              pd.scratchpad_desc()};
  if (bias) operation.arguments.emplace_back(bias_argument(options), *bias);
  return operation;
}

onednn::OperationPtr product_operation(const MatmulOperands& m, const MatmulOptions& options,
                                       int threads) {
  const MatmulOperands settled = for_onednn(m);
  const onednn::Key key = onednn::Key("matmul", threads)
                              .add(settled.a)
                              .add(settled.b)
                              .add(settled.y)
                              .add(options.bias)
                              .add(options.alpha)
                              .add(std::int64_t{options.accumulate})
                              .add(static_cast<std::int64_t>(options.activation));
  return onednn::cached(key, [&] { return make_product(settled, options); });
}

void execute_product(const onednn::Operation& operation, const MatmulOperands& m,
                     const MatmulOptions& options) {
  onednn::execute(kOp, operation, m.y.device,
                  {{DNNL_ARG_SRC, m.a.data},
                   {DNNL_ARG_WEIGHTS, m.b.data},
                   {DNNL_ARG_DST, m.y.data},
                   {bias_argument(options), options.bias.data}});
}

// y = product of operands that oneDNN takes as they are; bias dense. Batches that are not packed
// (views of a fused projection) are spread over the threads, one matrix at a time: oneDNN's batched
// product is slow or a reference loop for them.
void run_product(const MatmulOperands& m, const MatmulOptions& options) {
  const std::int64_t count = matrix_count(m.y);
  const int threads = onednn::threads_for(m.y.numel() * m.a.size(-1));
  if (count == 1 || is_packed(m)) {
    execute_product(*product_operation(m, options, threads), m, options);
    return;
  }
  const bool spread = threads > 1 && count >= threads;
  const auto operation = product_operation(matrix_at(m, 0), options, spread ? 1 : threads);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      execute_product(*operation, matrix_at(m, i), options);
  };
  core::parallel_for(count, spread ? 1 : count, run);
}

// A copy of an operand in another dtype or a plain layout; its repeats are not multiplied out.
Temporary plain_copy(const Backend& backend, const TensorView& view, DType dtype) {
  TensorView once = view;
  for (int i = 0; i < view.dims() - 2; ++i) {
    if (view.strides[i] == 0) once.shape[i] = 1;
  }
  const bool by_columns = view.strides[view.dims() - 2] == 1 && view.size(-1) > 1;
  Temporary copy =
      temporary(by_columns ? once.transpose(-2, -1).shape : once.shape, dtype, view.device);
  if (by_columns) copy.view = copy.view.transpose(-2, -1);
  backend.copy(once, copy.view);
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

// Whether oneDNN can write y: row-major, in the dtype computed in or f32.
bool is_direct_output(const TensorView& y, DType compute) {
  return y.strides[y.dims() - 1] == 1 && is_plain_matrix(y) &&
         (y.dtype == compute || y.dtype == DType::f32);
}

void product(const Backend& backend, const TensorView& a, const TensorView& b, const TensorView& y,
             MatmulOptions options) {
  const DType compute = onednn::compute_dtype(a.dtype);
  MatmulOperands m = merge_batches({a, b, y});
  const bool transposed_output = !is_direct_output(m.y, compute) && !options.bias.defined() &&
                                 is_direct_output(m.y.transpose(-2, -1), compute);
  if (transposed_output) m = m.transposed();
  const Temporary plain_a = operand(backend, m.a, compute),
                  plain_b = operand(backend, m.b, compute);
  const Temporary bias = bias_operand(backend, options.bias, compute);
  options.bias = bias.view;
  if (is_direct_output(m.y, compute)) {
    run_product({plain_a.view, plain_b.view, m.y}, options);
    return;
  }
  const Temporary sum = temporary(m.y.shape, DType::f32, y.device);
  const bool accumulate = std::exchange(options.accumulate, false);
  run_product({plain_a.view, plain_b.view, sum.view}, options);
  if (accumulate) {
    backend.axpby(1.0, sum.view, 1.0, m.y);
  } else {
    backend.copy(sum.view, m.y);
  }
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
