// One layer and direction of an LSTM over all of its steps.
#include "cairn/kernels/lstm.h"

#include "cairn/autograd/ops.h"
#include "cairn/kernels/matmul.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;

namespace {

// a b, where the input's gradient goes.
Tensor product_gradient(Context& ctx, int input, const TensorView& a, const TensorView& b) {
  if (!ctx.needs_grad(input)) return {};
  const GradTarget target = ctx.grad_target(input);
  kernels::matmul(a, b, target.tensor, {.accumulate = target.accumulate});
  return target.tensor;
}

void put_or_zero(const Tensor& value, const TensorView& where) {
  if (value.defined()) {
    kernels::copy(value, where);
  } else {
    kernels::fill(where, 0.0);
  }
}

TensorView matrix_of(const TensorView& x) {  // [T, B, W] -> [T B, W]
  return x.reshape({x.size(0) * x.size(1), x.size(2)});
}

// The result is [T + 2, B, H]: h in order of time, with the initial one where the first step looks
// for it, then the last c. What h's rows before a step are makes one product of the weight's
// gradient.
struct Lstm {
  static constexpr OpInfo kInfo{"lstm", CastPolicy::half};
  bool reverse;

  enum Input : std::uint8_t { kX, kIh, kHh, kBiasIh, kBiasHh, kH, kC, kLengths, kInputs };
  enum Saved : std::uint8_t { kRows, kIhSaved, kHhSaved, kGates, kStates, kCells, kLengthsSaved };

  Tensor forward(Context& ctx, const Tensors& in) {
    check(in);
    const std::int64_t T = in[kX].size(0), B = in[kX].size(1), H = in[kHh].size(1);
    const Tensor rows = as_matrix(in[kX]);
    const Tensor gates = empty_as(rows, {T, B, 4 * H}, rows.dtype());
    const Tensor bias = bias_of(in[kBiasIh], in[kBiasHh]);
    kernels::MatmulOptions options;
    if (bias.defined()) options.bias = bias;
    kernels::matmul(rows, in[kIh].view().transpose(0, 1), matrix_of(gates), options);

    Tensor states = empty_as(rows, {T + 2, B, H}, rows.dtype());
    const Tensor cells = empty_as(rows, {T + 1, B, H}, rows.dtype());
    put_or_zero(in[kH], states.view().select(0, first(T)));
    put_or_zero(in[kC], cells.view().select(0, first(T)));
    kernels::lstm(gates, in[kHh], history(states), cells, options_of(in[kLengths]));
    kernels::copy(cells.view().select(0, last(T)), states.view().select(0, T + 1));
    for (const Tensor& saved : {rows, in[kIh], in[kHh], gates, states, cells, in[kLengths]}) {
      ctx.save(saved);
    }
    return states;
  }

  Tensors backward(Context& ctx, const Tensor& dstates) {
    const Tensor activations = ctx.take_saved(kGates);  // whose place the gradients take
    const Tensor gates = reuse_or_new(activations, activations);
    if (!gates.same(activations)) kernels::copy(activations, gates);
    const std::int64_t T = gates.size(0);
    const Tensor dy = contiguous_data(dstates), states = ctx.saved(kStates);
    const Shape state{gates.size(1), gates.size(2) / 4};
    const Tensor dh = Tensor::zeros(state, wide(gates.dtype()), gates.device());
    const Tensor dc = empty_as(gates, state, wide(gates.dtype()));
    kernels::copy(dy.view().select(0, T + 1), dc);
    kernels::lstm_backward(gates, ctx.saved(kHhSaved), ctx.saved(kCells), history(dy), dh, dc,
                           options_of(ctx.saved(kLengthsSaved)));

    const TensorView dgates = matrix_of(gates);
    const TensorView before = history(states).slice(0, reverse ? 1 : 0, reverse ? T + 1 : T);
    Tensors d(kInputs);
    d[kIh] = product_gradient(ctx, kIh, dgates.transpose(0, 1), ctx.saved(kRows));
    d[kHh] = product_gradient(ctx, kHh, dgates.transpose(0, 1), matrix_of(before));
    if (ctx.needs_grad(kX)) d[kX] = input_gradient(ctx, dgates);
    add_bias_gradients(ctx, dgates, d);
    if (ctx.needs_grad(kH)) d[kH] = land(ctx, kH, dh);
    if (ctx.needs_grad(kC)) d[kC] = land(ctx, kC, dc);
    return d;
  }

 private:
  static void check(const Tensors& in) {
    const Tensor &x = in[kX], &ih = in[kIh], &hh = in[kHh];
    CAIRN_CHECK(x.dims() == 3 && x.size(0) >= 1, kInfo.name,
                "expected x [T, B, I] with T >= 1, got ", x.shape());
    CAIRN_CHECK(hh.defined() && hh.dims() == 2 && hh.size(0) == 4 * hh.size(1), kInfo.name,
                "expected weight hh [4 H, H], got ", hh.defined() ? core::str(hh.shape()) : "none");
    const Shape gates{hh.size(0)}, state{x.size(1), hh.size(1)};
    check_one("weight ih", ih, {hh.size(0), x.size(2)}, x.dtype());
    check_one("weight hh", hh, hh.shape(), x.dtype());
    if (in[kBiasIh].defined()) check_one("bias ih", in[kBiasIh], gates, x.dtype());
    if (in[kBiasHh].defined()) check_one("bias hh", in[kBiasHh], gates, x.dtype());
    if (in[kH].defined()) check_one("h", in[kH], state, x.dtype());
    if (in[kC].defined()) check_one("c", in[kC], state, x.dtype());
    if (in[kLengths].defined()) check_one("lengths", in[kLengths], {x.size(1)}, DType::i64);
  }
  static void check_one(const char* name, const Tensor& x, const Shape& shape, DType dtype) {
    CAIRN_CHECK(x.defined() && x.shape() == shape && x.dtype() == dtype, kInfo.name, "expected ",
                name, " ", shape, " ", dtype, ", got ",
                x.defined() ? core::str(x.shape(), " ", x.dtype()) : "none");
  }

  /// Both biases as one, in wide numbers; undefined where there is none.
  static Tensor bias_of(const Tensor& ih, const Tensor& hh) {
    const Tensor& one = ih.defined() ? ih : hh;
    if (!one.defined() || !ih.defined() || !hh.defined()) return one;
    Tensor sum = empty_as(one, one.shape(), wide(one.dtype()));
    kernels::copy(ih, sum);
    kernels::axpby(1.0, hh, 1.0, sum);
    return sum;
  }

  static Tensor input_gradient(Context& ctx, const TensorView& dgates) {
    const Tensor weight = ctx.saved(kIhSaved);
    const Tensor dx = empty_as(weight, {dgates.size(0), weight.size(1)}, weight.dtype());
    kernels::matmul(dgates, weight, dx);
    return dx.alias(dx.view().reshape(ctx.input_shape(kX)));
  }

  /// The same for both.
  static void add_bias_gradients(Context& ctx, const TensorView& dgates, Tensors& d) {
    if (!ctx.needs_grad(kBiasIh) && !ctx.needs_grad(kBiasHh)) return;
    const Tensor sum = Tensor::empty({1, dgates.size(1)}, wide(dgates.dtype), dgates.device);
    kernels::reduce(kernels::ReductionKind::sum, dgates, sum);
    const Tensor bias = sum.alias(sum.view().select(0, 0));
    for (const int input : {kBiasIh, kBiasHh}) {
      if (ctx.needs_grad(input)) d[static_cast<std::size_t>(input)] = land(ctx, input, bias);
    }
  }

  TensorView history(const Tensor& states) const {  // without the row of c
    return states.view().slice(0, 0, states.size(0) - 1);
  }
  std::int64_t first(std::int64_t T) const { return reverse ? T : 0; }
  std::int64_t last(std::int64_t T) const { return reverse ? 0 : T; }
  kernels::LstmOptions options_of(const Tensor& lengths) const {
    return {view_or_none(lengths), reverse};
  }
};

Tensor row(const Tensor& x, std::int64_t i) {
  return reshape(slice(x, 0, i, i + 1), Shape(x.shape().begin() + 1, x.shape().end()));
}

}  // namespace

LstmResult lstm(const Tensor& x, const LstmWeights& weights, const LstmOptions& options) {
  const Tensor states =
      apply_list(Lstm{options.reverse}, {x, weights.ih, weights.hh, weights.bias_ih,
                                         weights.bias_hh, options.h, options.c, options.lengths});
  const std::int64_t T = x.size(0), begin = options.reverse ? 0 : 1;
  return {slice(states, 0, begin, begin + T), row(states, options.reverse ? 0 : T),
          row(states, T + 1)};
}

}  // namespace cairn::autograd
