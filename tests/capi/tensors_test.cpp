// Arrays: what describes none, DLPack, norms, factors, clipping.
#include <dlpack/dlpack.h>

#include <cmath>
#include <limits>

#include "cairn/core/dlpack.h"
#include "calls.h"

namespace cairn::test {
namespace {

using core::BFloat16;

cairn_status norm_status(const cairn_tensor& tensor) {
  double norm = 0;
  return cairn_tensors_norm(&tensor, 1, 2.0, &norm, nullptr);
}

TEST(CapiTensors, WrongDescriptionsAreTold) {
  Array<float> array("fc.weight", {2, 3}, values_of<float>(6, 1));
  const auto expect = [&](auto&& change, const std::string& text) {
    cairn_tensor tensor = array.tensor();
    change(tensor);
    expect_failed(norm_status(tensor), CAIRN_INVALID_ARGUMENT,
                  {"[cairn_tensors_norm]", "'fc.weight'", text});
  };
  expect([](auto& x) { x.dtype = 0; }, "expected a dtype from 1 (CAIRN_F16) to 9 (CAIRN_BOOL)");
  expect([](auto& x) { x.dtype = 10; }, "got 10");
  expect([](auto& x) { x.dtype = -1; }, "got -1");
  expect([](auto& x) { x.dims = 9; }, "0 to 8 dimensions");
  expect([](auto& x) { x.dims = -1; }, "0 to 8 dimensions");
  expect([](auto& x) { x.shape = nullptr; }, "the shape of");
  const int64_t negative[] = {2, -3}, huge[] = {int64_t{1} << 40, int64_t{1} << 40};
  expect([&](auto& x) { x.shape = negative; }, "got -3 as number 1");
  expect([&](auto& x) { x.shape = huge; }, "sizes that fit into memory");
  expect([](auto& x) { x.data = nullptr; }, "the memory of");
  expect([](auto& x) { x.data = static_cast<char*>(x.data) + 1; }, "aligned to 4 bytes");
  expect([](auto& x) { x.device_type = 7; }, "0 (CAIRN_CPU) or 1 (CAIRN_CUDA)");
  cairn_tensor elsewhere = array.tensor();
  elsewhere.device_index = 99;
  expect_failed(norm_status(elsewhere), CAIRN_INVALID_ARGUMENT, {"cpu:99"});
  expect_ok(norm_status(array.tensor()));
}

// Codes of dtypes: the bytes of 1.0 and 2.0 say what they were read as.
TEST(CapiTensors, DTypesAreWhatTheirCodesSay) {
  Array<core::Half> f16("x", {2}, {core::Half(1.0f), core::Half(2.0f)});
  Array<BFloat16> bf16("x", {2}, {BFloat16(1.0f), BFloat16(2.0f)});
  Array<float> f32("x", {2}, {1.0f, 2.0f});
  for (const cairn_tensor& tensor : {f16.tensor(), bf16.tensor(), f32.tensor()}) {
    double norm = 0;
    expect_ok(cairn_tensors_norm(&tensor, 1, 1.0, &norm, nullptr));
    EXPECT_EQ(norm, 3.0);
  }
  Array<double> f64("x", {2}, {1.0, 2.0});
  expect_failed(norm_status(f64.tensor()), CAIRN_INVALID_ARGUMENT, {"f64"});
}

TEST(CapiTensors, DlpackIsDescribedAndLeftTheCallers) {
  const Tensor x = Tensor::from(std::vector<float>{3, 4, 0, 0, 0, 0}, {2, 3}, DType::bf16);
  DLManagedTensor* const managed = core::to_dlpack(x);
  cairn_tensor tensor = {};
  expect_ok(cairn_tensor_from_dlpack(managed, &tensor));
  EXPECT_EQ(tensor.data, x.raw_data());
  EXPECT_EQ(tensor.dims, 2);
  EXPECT_EQ(tensor.shape[1], 3);
  EXPECT_EQ(tensor.dtype, CAIRN_BF16);
  double norm = 0;
  expect_ok(cairn_tensors_norm(&tensor, 1, 2.0, &norm, nullptr));
  EXPECT_EQ(norm, 5.0);
  managed->dl_tensor.dtype.lanes = 2;
  expect_failed(cairn_tensor_from_dlpack(managed, &tensor), CAIRN_INVALID_ARGUMENT, {"lanes"});
  managed->dl_tensor.dtype.lanes = 1;
  managed->deleter(managed);  // still ours to call, once
  DLManagedTensor* const turned = core::to_dlpack(x.alias(x.view().transpose(0, 1)));
  expect_failed(cairn_tensor_from_dlpack(turned, &tensor), CAIRN_INVALID_ARGUMENT,
                {"row-major memory without gaps"});
  turned->deleter(turned);
}

TEST(CapiTensors, TheNormIsThatOfAllFiniteElements) {
  Array<float> a("a", {3}, {3.0f, INFINITY, NAN}), b("b", {1, 1}, {-4.0f});
  const cairn_tensor both[] = {a.tensor(), b.tensor()};
  double norm = 0;
  int64_t nonfinite = 0;
  expect_ok(cairn_tensors_norm(both, 2, 2.0, &norm, &nonfinite));
  EXPECT_EQ(norm, 5.0);
  EXPECT_EQ(nonfinite, 2);
  expect_ok(cairn_tensors_norm(both, 2, INFINITY, &norm, nullptr));
  EXPECT_EQ(norm, 4.0);
  expect_failed(cairn_tensors_norm(both, 2, 0.5, &norm, nullptr), CAIRN_INVALID_ARGUMENT, {"0.5"});
}

TEST(CapiTensors, AFactorConvertsAndRoundsOnce) {
  Array<float> from("from", {3}, {1.0f, 1.00390625f, -0.25f});  // the second lies between two bf16
  Array<BFloat16> to("to", {3}, std::vector<BFloat16>(3));
  const cairn_tensor in = from.tensor(), out = to.tensor();
  expect_ok(cairn_tensors_scale(&in, &out, 1, 3.0));
  EXPECT_EQ(static_cast<float>(to.values[0]), 3.0f);
  EXPECT_EQ(static_cast<float>(to.values[1]), 3.015625f);  // of 3.01171875: ties to even
  EXPECT_EQ(static_cast<float>(to.values[2]), -0.75f);
  Array<float> shorter("shorter", {2}, {0, 0});
  const cairn_tensor other = shorter.tensor();
  EXPECT_EQ(cairn_tensors_scale(&in, &other, 1, 1.0), CAIRN_INVALID_ARGUMENT);
}

TEST(CapiTensors, ClippingIsTorchs) {
  Array<float> a("a", {2}, {3.0f, 0.0f}), b("b", {1}, {4.0f});
  const cairn_tensor both[] = {a.tensor(), b.tensor()};
  double norm = 0;
  expect_ok(cairn_tensors_clip(both, 2, 10.0, 2.0, &norm));
  EXPECT_EQ(norm, 5.0);
  EXPECT_EQ(a.values[0], 3.0f);
  expect_ok(cairn_tensors_clip(both, 2, 1.0, 2.0, &norm));
  EXPECT_EQ(norm, 5.0);
  EXPECT_FLOAT_EQ(a.values[0], static_cast<float>(3.0 / (5.0 + 1e-6)));
  EXPECT_FLOAT_EQ(b.values[0], static_cast<float>(4.0 / (5.0 + 1e-6)));
  b.values[0] = INFINITY;
  const float before = a.values[0];
  expect_failed(cairn_tensors_clip(both, 2, 1e-3, 2.0, &norm), CAIRN_ERROR, {"got 1 that"});
  EXPECT_EQ(a.values[0], before);
  EXPECT_EQ(cairn_tensors_clip(both, 2, 0.0, 2.0, &norm), CAIRN_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace cairn::test
