// Every kernel says which memory it writes (Storage::version), so that whoever keeps something
// derived from it notices: saved tensors, cached casts, masters.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/embedding.h"
#include "cairn/kernels/hash_tensors.h"
#include "cairn/kernels/layer_norm.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/kernels/pool.h"
#include "cairn/kernels/softmax.h"
#include "cairn/kernels/update_scale.h"
#include "support/versions.h"

namespace cairn::kernels {
namespace {

using test::Call;

Tensor f32(const Shape& shape) {
  return test::random_tensor(shape, DType::f32, {}, 1, 0.1, 0.9);
}
Tensor of(DType dtype, const Shape& shape) {
  return Tensor::zeros(shape, dtype);
}

class Versions : public testing::TestWithParam<Call> {};

TEST_P(Versions, CountWritesToOutputsAlone) {
  test::expect_outputs_counted(GetParam());
}

std::vector<Call> elementwise_calls() {
  const Shape s{4, 3};
  return {
      {"fill", {}, {f32(s)}, [](auto&, auto& y) { fill(y[0], 1.0); }},
      {"copy", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { copy(x[0], y[0]); }},
      {"copy_across_devices",
       {f32(s)},
       {Tensor::zeros(s, DType::f32, {core::DeviceType::cpu, 1})},
       [](auto& x, auto& y) { copy(x[0], y[0]); }},
      {"binary",
       {f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { binary(BinaryOp::add, x[0], x[1], y[0]); }},
      {"unary", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { unary(UnaryOp::exp, x[0], y[0]); }},
      {"unary_backward",
       {f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { unary_backward(UnaryOp::exp, x[0], x[1], y[0]); }},
      {"affine", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { affine(x[0], 2.0, 1.0, y[0]); }},
      {"pow_scalar", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { pow_scalar(x[0], 2.0, y[0]); }},
      {"axpby", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { axpby(1.0, x[0], 1.0, y[0]); }},
      {"dropout", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { dropout(x[0], 0.5, 1, 0, y[0]); }},
      {"reduce",
       {f32(s)},
       {f32({4, 1})},
       [](auto& x, auto& y) { reduce(ReductionKind::sum, x[0], y[0]); }},
  };
}

std::vector<Call> row_calls() {
  const Shape s{4, 3};
  return {
      {"softmax", {f32(s)}, {f32(s)}, [](auto& x, auto& y) { softmax(x[0], y[0]); }},
      {"softmax_backward",
       {f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { softmax_backward(x[0], x[1], y[0]); }},
      {"layer_norm",
       {f32(s), f32({3}), f32({3})},
       {f32(s), f32({4}), f32({4})},
       [](auto& x, auto& y) { layer_norm(x[0], x[1], x[2], 1e-5, y[0], y[1], y[2]); }},
      {"layer_norm_backward",
       {f32(s), f32({3}), f32({4}), f32({4}), f32(s)},
       {f32(s), f32({3}), f32({3})},
       [](auto& x, auto& y) {
         layer_norm_backward(x[0], x[1], x[2], x[3], x[4], y[0], y[1], y[2], false);
       }},
      {"rms_norm",
       {f32(s), f32({3})},
       {f32(s), f32({4})},
       [](auto& x, auto& y) { rms_norm(x[0], x[1], 1e-5, y[0], y[1]); }},
      {"rms_norm_backward",
       {f32(s), f32({3}), f32({4}), f32(s)},
       {f32(s), f32({3})},
       [](auto& x, auto& y) { rms_norm_backward(x[0], x[1], x[2], x[3], y[0], y[1], true); }},
      {"cross_entropy",
       {f32(s), of(DType::i64, {4})},
       {f32({4}), f32({4})},
       [](auto& x, auto& y) { cross_entropy(x[0], x[1], y[0], y[1], {}); }},
      {"cross_entropy_backward",
       {f32(s), of(DType::i64, {4}), f32({4}), f32({4})},
       {f32(s)},
       [](auto& x, auto& y) { cross_entropy_backward(x[0], x[1], x[2], x[3], y[0], {}); }},
      {"mse", {f32(s), f32(s)}, {f32(s)}, [](auto& x, auto& y) { mse(x[0], x[1], y[0]); }},
      {"mse_backward",
       {f32(s), f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { mse_backward(x[0], x[1], x[2], y[0]); }},
      {"bce_with_logits",
       {f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { bce_with_logits(x[0], x[1], y[0]); }},
      {"bce_with_logits_backward",
       {f32(s), f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { bce_with_logits_backward(x[0], x[1], x[2], y[0]); }},
      {"bce", {f32(s), f32(s)}, {f32(s)}, [](auto& x, auto& y) { bce(x[0], x[1], y[0]); }},
      {"bce_backward",
       {f32(s), f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { bce_backward(x[0], x[1], x[2], y[0]); }},
      {"embedding",
       {f32({5, 3}), of(DType::i64, {4})},
       {f32(s)},
       [](auto& x, auto& y) { embedding(x[0], x[1], y[0]); }},
      {"embedding_backward",
       {f32(s), of(DType::i64, {4})},
       {f32({5, 3})},
       [](auto& x, auto& y) { embedding_backward(x[0], x[1], y[0], false); }},
  };
}

std::vector<Call> image_calls() {
  const Shape image{2, 3, 4, 4}, half{2, 3, 2, 2};
  const auto c = [] { return f32({3}); };
  return {
      {"max_pool2d",
       {f32(image)},
       {f32(half), of(DType::i32, half)},
       [](auto& x, auto& y) { max_pool2d(x[0], y[0], y[1], {}); }},
      {"max_pool2d_backward",
       {f32(half), of(DType::i32, half)},
       {f32(image)},
       [](auto& x, auto& y) { max_pool2d_backward(x[0], x[1], y[0], {}); }},
      {"avg_pool2d",
       {f32(image)},
       {f32(half)},
       [](auto& x, auto& y) { avg_pool2d(x[0], y[0], {}); }},
      {"avg_pool2d_backward",
       {f32(half)},
       {f32(image)},
       [](auto& x, auto& y) { avg_pool2d_backward(x[0], y[0], {}); }},
      {"batch_norm",
       {f32(image), c(), c()},
       {c(), c(), f32(image), c(), c()},
       [](auto& x, auto& y) { batch_norm(x[0], x[1], x[2], y[0], y[1], y[2], y[3], y[4], {}); }},
      {"batch_norm_eval",
       {f32(image), c(), c(), c(), c()},
       {f32(image)},
       [](auto& x, auto& y) { batch_norm_eval(x[0], x[1], x[2], x[3], x[4], y[0], {}); }},
      {"batch_norm_backward",
       {f32(image), c(), c(), c(), f32(image)},
       {f32(image), c(), c()},
       [](auto& x, auto& y) {
         batch_norm_backward(x[0], {}, x[1], x[2], x[3], x[4], y[0], y[1], y[2], {});
       }},
      {"batch_norm_moments",
       {f32(image)},
       {f32({7})},
       [](auto& x, auto& y) { batch_norm_moments(x[0], y[0]); }},
      {"batch_norm_merge",
       {f32({2, 7})},
       {c(), c(), c(), c(), c(), f32({1})},
       [](auto& x, auto& y) { batch_norm_merge(x[0], y[0], y[1], y[2], y[3], y[4], y[5], {}); }},
      {"batch_norm_backward_data",
       {f32(image), c(), c(), c(), f32(image), c(), c()},
       {f32(image)},
       [](auto& x, auto& y) {
         batch_norm_backward_data(x[0], {}, x[1], x[2], x[3], x[4], x[5], x[6], y[0], {});
       }},
  };
}

std::vector<Call> list_calls() {
  const Shape s{7}, one{1};
  const auto half = [&] { return of(DType::bf16, s); };
  return {
      {"check_tensors", {f32(s)}, {}, [](auto& x, auto&) { check_tensors({x[0]}).read(); }},
      {"hash_tensors", {f32(s)}, {}, [](auto& x, auto&) { hash_tensors({x[0]}); }},
      {"multi_tensor_scale",
       {f32(s), f32(s)},
       {f32(s), f32(s)},
       [](auto& x, auto& y) {
         multi_tensor_scale({x[0], x[1]}, {y[0], y[1]}, 2.0).read();
       }},
      {"multi_tensor_axpby",
       {f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) { multi_tensor_axpby(1.0, {x[0]}, 1.0, {x[1]}, {y[0]}).read(); }},
      {"update_scale",
       {f32(one)},
       {f32(one), of(DType::i32, one), of(DType::i32, one)},
       [](auto& x, auto& y) { update_scale(y[0], y[1], y[2], x[0]); }},
      {"find_nonfinite",
       {f32(s)},
       {f32(one)},
       [](auto& x, auto& y) { find_nonfinite({x[0]}, {y[0]}); }},
      {"adam_update",
       {f32(s)},
       {half(), f32(s), f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], y[1], y[2], y[3]}}, AdamOptions{});
       }},
      {"adam_device_update",
       {f32(s), of(DType::f64, one), of(DType::i32, one)},
       {f32(s), f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, y[1], y[2]}}, AdamOptions{}, {.lr = x[1], .step = x[2]});
       }},
      {"advance_step",
       {f32(one)},
       {of(DType::i32, one)},
       [](auto& x, auto& y) { advance_step(y[0], x[0]); }},
      {"sgd_update",
       {f32(s)},
       {f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, y[1]}}, SgdOptions{.momentum = 0.9});
       }},
      {"sgd_update_without_momentum",
       {f32(s), f32(s)},
       {f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, x[1]}}, SgdOptions{});
       }},
      {"adagrad_update",
       {f32(s)},
       {f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, y[1]}}, AdagradOptions{});
       }},
      {"rmsprop_update",
       {f32(s)},
       {f32(s), f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, y[1], y[2]}}, RmsPropOptions{.momentum = 0.9});
       }},
      {"novograd_update",
       {f32(s)},
       {f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, y[1]}}, NovoGradOptions{});
       }},
      {"lamb_update",
       {f32(s)},
       {f32(s), f32(s), f32(s)},
       [](auto& x, auto& y) {
         update({{x[0], y[0], {}, y[1], y[2]}}, LambOptions{});
       }},
      {"join_master",
       {half(), of(DType::i16, s)},
       {f32(s)},
       [](auto& x, auto& y) { join_master(x[0], x[1], y[0]); }},
      {"split_master",
       {f32(s)},
       {half(), of(DType::i16, s)},
       [](auto& x, auto& y) { split_master(x[0], y[0], y[1]); }},
      {"reconcile_master",
       {half()},
       {f32(s)},
       [](auto& x, auto& y) { reconcile_master(x[0], y[0]); }},
      {"reconcile_remainder",
       {half(), half()},
       {of(DType::i16, s)},
       [](auto& x, auto& y) { reconcile_remainder(x[0], x[1], y[0]); }},
  };
}

INSTANTIATE_TEST_SUITE_P(Elementwise, Versions, testing::ValuesIn(elementwise_calls()),
                         test::call_name);
INSTANTIATE_TEST_SUITE_P(Rows, Versions, testing::ValuesIn(row_calls()), test::call_name);
INSTANTIATE_TEST_SUITE_P(Images, Versions, testing::ValuesIn(image_calls()), test::call_name);
INSTANTIATE_TEST_SUITE_P(Lists, Versions, testing::ValuesIn(list_calls()), test::call_name);

TEST(Versions, FailedChecksCountNothing) {
  const Tensor x = f32({3}), y = f32({4});
  EXPECT_THROW(unary(UnaryOp::exp, x, y), core::InvalidArgument);
  EXPECT_EQ(y.storage()->version(), 0u);
}

}  // namespace
}  // namespace cairn::kernels
