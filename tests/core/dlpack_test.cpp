#include "cairn/core/dlpack.h"

#include <dlpack/dlpack.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "cairn/core/error.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A foreign tensor [2, 3] f32 that counts how often it is deleted.
struct Foreign {
  std::array<float, 6> values{1, 2, 3, 4, 5, 6};
  std::array<std::int64_t, 2> shape{2, 3};
  std::array<std::int64_t, 2> strides{3, 1};
  DLManagedTensor managed{};
  int deleted = 0;

  Foreign() {
    managed.dl_tensor.data = values.data();
    managed.dl_tensor.device = {kDLCPU, 0};
    managed.dl_tensor.ndim = 2;
    managed.dl_tensor.dtype = {kDLFloat, 32, 1};
    managed.dl_tensor.shape = shape.data();
    managed.dl_tensor.strides = strides.data();
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensor* self) {
      ++static_cast<Foreign*>(self->manager_ctx)->deleted;
    };
  }
  std::string import_error() {
    return message_of<InvalidArgument>([&] { from_dlpack(&managed); });
  }
};

TEST(DLPack, ExportSharesMemoryAndKeepsItAlive) {
  Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  const std::weak_ptr<Storage> watch = x.storage();
  DLManagedTensor* out = to_dlpack(x.alias(x.view().transpose(0, 1)));
  x = {};
  const DLTensor& dl = out->dl_tensor;
  EXPECT_EQ(dl.ndim, 2);
  EXPECT_EQ(dl.shape[0], 3);
  EXPECT_EQ(dl.strides[0], 1);
  EXPECT_EQ(dl.strides[1], 3);
  EXPECT_EQ(static_cast<float*>(dl.data)[5], 6.0f);
  EXPECT_FALSE(watch.expired());
  out->deleter(out);
  EXPECT_TRUE(watch.expired());
}

TEST(DLPack, RoundTripOfEveryDType) {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i16, DType::i32,
                      DType::i64, DType::u8, DType::boolean}) {
    const Tensor x = Tensor::from<double>({0, 1, 1}, {3}, dtype);
    const Tensor y = from_dlpack(to_dlpack(x));
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(y.raw_data(), x.raw_data());
    EXPECT_THAT(y.to_vector(), ElementsAre(0, 1, 1));
  }
}

TEST(DLPack, ImportDropsTheOwnerWithTheLastTensor) {
  Foreign foreign;
  Tensor x = from_dlpack(&foreign.managed);
  EXPECT_EQ(x.raw_data(), foreign.values.data());
  const Tensor row = x.alias(x.view().select(0, 1));
  x = {};
  EXPECT_EQ(foreign.deleted, 0);
  EXPECT_THAT(row.to_vector(), ElementsAre(4, 5, 6));
  const_cast<Tensor&>(row) = {};
  EXPECT_EQ(foreign.deleted, 1);
}

TEST(DLPack, NullStridesOffsetAndEmpty) {
  Foreign foreign;
  foreign.managed.dl_tensor.strides = nullptr;
  foreign.managed.dl_tensor.byte_offset = 4;
  foreign.shape = {1, 5};
  EXPECT_THAT(from_dlpack(&foreign.managed).to_vector(), ElementsAre(2, 3, 4, 5, 6));
  EXPECT_EQ(foreign.deleted, 1);
  foreign.shape = {0, 5};
  foreign.managed.dl_tensor.data = nullptr;
  EXPECT_EQ(from_dlpack(&foreign.managed).numel(), 0);
  const Tensor scalar = from_dlpack(to_dlpack(Tensor::full({}, 4)));
  EXPECT_EQ(scalar.item(), 4);
}

TEST(DLPack, RefusesWhatItCannotHold) {
  const auto with = [](auto&& change) {
    Foreign foreign;
    change(foreign);
    const std::string message = foreign.import_error();
    EXPECT_EQ(foreign.deleted, 0);  // still the caller's
    return message;
  };
  EXPECT_THAT(with([](Foreign& f) {
                f.managed.dl_tensor.dtype = {kDLInt, 8, 1};
              }),
              HasSubstr("type code 0 with 8 bits and 1 lanes"));
  EXPECT_THAT(with([](Foreign& f) { f.managed.dl_tensor.dtype.lanes = 2; }), HasSubstr("2 lanes"));
  EXPECT_THAT(with([](Foreign& f) {
                f.managed.dl_tensor.device = {kDLVulkan, 0};
              }),
              HasSubstr("DLPack device type 7"));
  EXPECT_THAT(with([](Foreign& f) { f.strides = {-3, 1}; }), HasSubstr("expected strides >= 0"));
  EXPECT_THAT(with([](Foreign& f) { f.managed.dl_tensor.byte_offset = 1; }),
              HasSubstr("aligned to 4 bytes"));
  EXPECT_THAT(with([](Foreign& f) { f.managed.dl_tensor.ndim = 9; }), HasSubstr("at most 8"));
  EXPECT_THAT(with([](Foreign& f) {
                f.managed.dl_tensor.device = {kDLCUDA, 99};
              }),
              HasSubstr("[device]"));
  EXPECT_THAT(with([](Foreign& f) { f.managed.dl_tensor.data = nullptr; }),
              HasSubstr("got a null pointer"));
  EXPECT_THROW(from_dlpack(nullptr), InvalidArgument);
  EXPECT_THROW(to_dlpack(Tensor()), InvalidArgument);
}

}  // namespace
}  // namespace cairn::core
