// Apex's tests of synchronised batch norm (rows 27 to 30), with ranks that are threads, against
// double precision. Apex's sizes and tolerances; f64 inputs are left out: Cairn's batch norm
// computes in f32.
#include <gtest/gtest.h>

#include "cairn/autograd/autograd.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "on_ranks.h"
#include "support/batch_norm_reference.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::conformance {
namespace {

using parallel::ProcessGroup;
using parallel::SyncBatchNorm;
using test::expect_close;
using test::random_values;
using test::rows_of;
using test::Values;
using Reference = test::BatchNormReference;

/// A batch with values of that dtype, affine parameters and gradients.
Reference batch_of(const Shape& shape, DType dtype, std::uint64_t seed) {
  const auto values = [&](std::uint64_t own, double low, double high) {
    return test::random_tensor(shape, dtype, Device{}, seed + own, low, high).to_vector();
  };
  Reference r{.shape = shape,
              .x = values(1, -2.0, 3.0),
              .dy = values(2, -1.0, 1.0),
              .weight = random_values(shape[1], seed + 3, 0.5, 1.5),
              .bias = random_values(shape[1], seed + 4)};
  r.run();
  return r;
}

Tensor part_of(const Values& whole, const Reference& r, std::int64_t begin, std::int64_t end,
               DType dtype, bool channels_last) {
  Shape shape = r.shape;
  shape[0] = end - begin;
  const Tensor x = Tensor::from(rows_of(whole, r.shape, begin, end), shape, dtype);
  return channels_last ? autograd::channels_last(x).detach() : x;
}

void set_affine(const SyncBatchNorm& norm, const Reference& r) {
  const Shape shape{r.shape[1]};
  kernels::copy(Tensor::from(r.weight, shape, DType::f32), norm.weight());
  kernels::copy(Tensor::from(r.bias, shape, DType::f32), norm.bias());
}

// Row 27. Momentum 1: the running statistics are the batch's.
TEST(SyncBatchNorm, SingleRank) {
  const Reference r = batch_of({5, 10, 16, 16}, DType::f32, 1);
  constexpr double kClose = 1e-5;
  for (const bool channels_last : {false, true}) {
    SyncBatchNorm norm(10, ProcessGroup::single(), {.momentum = 1.0});
    set_affine(norm, r);
    Tensor x = part_of(r.x, r, 0, 5, DType::f32, channels_last);
    x.set_requires_grad(true);
    const Tensor y = norm(x);
    autograd::backward(y, part_of(r.dy, r, 0, 5, DType::f32, channels_last));
    expect_close(y, r.y, kClose, kClose, "out");
    expect_close(x.grad(), r.dx, kClose, kClose, "dx");
    expect_close(norm.weight().grad(), r.dweight, kClose, kClose * r.count() / 100, "dw");
    expect_close(norm.bias().grad(), r.dbias, kClose, kClose, "db, which is sum_dy");
    expect_close(norm.running_mean(), r.mean, kClose, kClose, "mean");
    Values biased = norm.running_var().to_vector(), sum_dy_xmu = norm.weight().grad().to_vector();
    Values expected = r.dweight;
    for (std::size_t c = 0; c < biased.size(); ++c) {
      biased[c] *= (r.count() - 1.0) / r.count();
      const double deviation = std::sqrt(r.var[c] + r.eps);
      sum_dy_xmu[c] *= deviation;
      expected[c] *= deviation;
    }
    expect_close(biased, r.var, kClose, kClose, "biased variance");
    expect_close(sum_dy_xmu, expected, kClose, kClose * r.count() / 100, "sum_dy_xmu");
  }
}

/// A batch norm under DDP on the ranks of a group, each with its even part of the batch; a step of
/// SGD at rate 1 on the mean of the ranks' sums.
void check_in_group(const ProcessGroup& group, const Reference& r, DType dtype, double close,
                    bool channels_last) {
  SyncBatchNorm norm(r.shape[1], group, {.momentum = 1.0});
  set_affine(norm, r);
  optim::FusedSGD sgd(norm.parameters(), {.lr = 1.0});
  parallel::DistributedDataParallel ddp(norm, group);
  const std::int64_t each = r.shape[0] / group.world_size();
  const std::int64_t begin = each * group.rank(), end = begin + each;
  Tensor x = part_of(r.x, r, begin, end, dtype, channels_last);
  x.set_requires_grad(true);
  const Tensor y = ddp(x);
  autograd::backward(y, part_of(r.dy, r, begin, end, dtype, channels_last));
  test::expect_applied(sgd.step());
  expect_close(y, rows_of(r.y, r.shape, begin, end), close, close, "out");
  expect_close(x.grad(), rows_of(r.dx, r.shape, begin, end), close, close, "dx");
  expect_close(norm.running_mean(), r.mean, 1e-5, 1e-5, "running mean");
  Values var = r.var, weight = r.weight, bias = r.bias;
  for (std::size_t c = 0; c < var.size(); ++c) {
    var[c] *= r.count() / (r.count() - 1.0);
    weight[c] -= r.dweight[c] / group.world_size();
    bias[c] -= r.dbias[c] / group.world_size();
  }
  expect_close(norm.running_var(), var, 1e-5, 1e-5, "running variance");
  // Sums over thousands of values: what their rounding may leave.
  const double loose = close * std::sqrt(r.count()) / 10.0;
  expect_close(norm.weight(), weight, close, loose, "weight after the step");
  expect_close(norm.bias(), bias, close, loose, "bias after the step");
}

// Row 28.
TEST(SyncBatchNorm, TwoRanks) {
  for (const auto& [dtype, close] :
       {std::pair<DType, double>{DType::f32, 1e-5}, {DType::f16, 1e-3}}) {
    const Reference r = batch_of({32, 10, 40, 40}, dtype, 18);
    for (const bool channels_last : {false, true}) {
      on_ranks(2, [&, dtype = dtype, close = close](ProcessGroup& group) {
        check_in_group(group, r, dtype, close, channels_last);
      });
    }
  }
}

/// A convolution [O, C, 3, 3] with padding 1, forward and the gradient of its weight, in double.
struct Convolution {
  Shape x_shape;
  std::int64_t out;
  template <class F>  // f(y's index, x's index, weight's index)
  void each(F f) const {
    const std::int64_t n = x_shape[0], in = x_shape[1], h = x_shape[2], w = x_shape[3];
    for (std::int64_t i = 0; i < n * out * h * w; ++i) {
      const std::int64_t column = i % w, row = i / w % h, o = i / (w * h) % out,
                         b = i / (w * h * out);
      for (std::int64_t k = 0; k < in * 9; ++k) {
        const std::int64_t at_row = row + k / 3 % 3 - 1, at_column = column + k % 3 - 1;
        if (at_row < 0 || at_row >= h || at_column < 0 || at_column >= w) continue;
        const std::int64_t x = ((b * in + k / 9) * h + at_row) * w + at_column;
        f(static_cast<std::size_t>(i), static_cast<std::size_t>(x),
          static_cast<std::size_t>(o * in * 9 + k));
      }
    }
  }
};

// Row 29: 16 samples, 50 times larger, on rank 0; 8 on rank 1. The loss is the mean over all 24.
TEST(SyncBatchNorm, RanksWithDifferentBatches) {
  const Shape shape{24, 3, 8, 8};
  const Convolution convolution{shape, 3};
  Values x = random_values(shape.numel(), 1), w = random_values(3 * 3 * 9, 2, -0.3, 0.3);
  for (std::size_t i = 0; i < x.size() * 16 / 24; ++i) x[i] *= 50.0;
  for (double& value : x) value = static_cast<float>(value);
  Reference r{.shape = shape,
              .x = Values(x.size(), 0.0),
              .dy = random_values(shape.numel(), 3),
              .weight = random_values(3, 4, 0.5, 1.5),
              .bias = random_values(3, 5)};
  convolution.each([&](std::size_t y, std::size_t at, std::size_t k) { r.x[y] += x[at] * w[k]; });
  for (double& value : r.dy) value /= 24.0;
  r.run();
  Values dw(w.size(), 0.0);
  convolution.each([&](std::size_t y, std::size_t at, std::size_t k) { dw[k] += r.dx[y] * x[at]; });
  on_ranks(2, [&](ProcessGroup& group) {
    auto conv =
        std::make_shared<nn::Conv2d>(3, 3, 3, nn::Conv2dOptions{.padding = 1, .bias = false});
    auto norm = std::make_shared<SyncBatchNorm>(3, group, nn::BatchNormOptions{.momentum = 1.0});
    kernels::copy(Tensor::from(w, {3, 3, 3, 3}, DType::f32), conv->parameters()[0].tensor);
    set_affine(*norm, r);
    nn::Sequential model;
    model.add(conv);
    model.add(norm);
    parallel::DistributedDataParallel ddp(model, group);
    const bool first = group.rank() == 0;
    const std::int64_t begin = first ? 0 : 16, end = first ? 16 : 24;
    const Tensor y = ddp(part_of(x, r, begin, end, DType::f32, false));
    Values dy = r.dy;  // DDP takes the mean of two ranks
    for (double& value : dy) value *= 2.0;
    autograd::backward(y, part_of(dy, r, begin, end, DType::f32, false));
    expect_close(y, rows_of(r.y, r.shape, begin, end), 1e-5, 1e-5, "out");
    expect_close(norm->running_mean(), r.mean, 1e-5, 1e-5, "running mean");
    Values var = r.var;
    for (double& v : var) v *= r.count() / (r.count() - 1.0);
    expect_close(norm->running_var(), var, 1e-5, 1e-5, "running variance");
    expect_close(conv->parameters()[0].tensor.grad(), dw, 1e-5, 1e-5,
                 "gradient of the convolution");
    expect_close(norm->weight().grad(), r.dweight, 1e-6, 1e-6, "gradient of the weight");
    expect_close(norm->bias().grad(), r.dbias, 1e-6, 1e-6, "gradient of the bias");
  });
}

// Row 30: two groups of two ranks, each with a batch of its own; and one value a channel and
// sample.
TEST(SyncBatchNorm, GroupsOfTwoRanks) {
  const Reference batches[] = {batch_of({16, 10, 40, 40}, DType::f32, 18),
                               batch_of({16, 10, 40, 40}, DType::f32, 40)};
  const Reference flat = batch_of({8, 4}, DType::f32, 7);
  on_ranks(4, [&](ProcessGroup& group) {
    const int color = group.rank() / 2;
    check_in_group(group.split(color), batches[color], DType::f32, 1e-5, true);
    check_in_group(group, flat, DType::f32, 1e-5, false);
  });
}

}  // namespace
}  // namespace cairn::conformance
