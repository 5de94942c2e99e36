// A half weight and its exact value beside it, while others write one of the two.
#include "cairn/kernels/master_weight.h"

#include <dlpack/dlpack.h>
#include <gmock/gmock.h>

#include <functional>
#include <thread>

#include "cairn/core/dlpack.h"
#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "support/message_of.h"
#include "update_cases.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::Values;
using testing::HasSubstr;

struct HalfCase {
  DType dtype;
  MasterStorage storage;
};
constexpr HalfCase kHalves[] = {{DType::f16, MasterStorage::f32},
                                {DType::bf16, MasterStorage::f32},
                                {DType::bf16, MasterStorage::remainder}};

class MasterWeights : public testing::TestWithParam<Device> {
 protected:
  // What no half type holds, with both signs, and what each does.
  const Values exact_ = {
      static_cast<float>(1.1),  static_cast<float>(-1.1), 3.0, static_cast<float>(0.3), -2.0,
      static_cast<float>(-1e-3)};

  Tensor weight(const HalfCase& half) const {
    const Tensor w = Tensor::empty({6}, half.dtype, GetParam());
    MasterWeight::assign(w, Tensor::from(exact_, {6}, DType::f32, GetParam()), half.storage);
    return w;
  }
};

Values exact_of(const Tensor& weight) {
  return master_value(weight).to_vector<double>();
}

TEST_P(MasterWeights, AKernelThatChangesNothingKeepsEveryBit) {
  const auto writes = std::vector<std::function<void(const Tensor&)>>{
      [](const Tensor& w) { axpby(0.0, w, 1.0, w); },
      [](const Tensor& w) { affine(w, 1.0, 0.0, w); },
      [](const Tensor& w) {
        const Tensor same = Tensor::empty_like(w);
        copy(w, same);
        copy(same, w);
        copy_bytes(same, w.detach());
      }};
  for (const HalfCase& half : kHalves) {
    const Tensor w = weight(half);
    for (const auto& write : writes) {
      write(w);
      EXPECT_EQ(exact_of(w), exact_) << half.dtype;
    }
  }
}

TEST_P(MasterWeights, AKernelThatChangesSomeTakesTheirsAlone) {
  for (const HalfCase& half : kHalves) {
    const Tensor w = weight(half);
    unary(UnaryOp::relu, w, w);
    fill(w.view().slice(0, 2, 3), 0.5);
    Values expected = exact_;
    expected[1] = expected[4] = expected[5] = 0;
    expected[2] = 0.5;
    EXPECT_EQ(exact_of(w), expected) << half.dtype;
    fill(w, 2.0);  // and so on
    EXPECT_EQ(exact_of(w), Values(6, 2.0)) << half.dtype;
  }
}

TEST_P(MasterWeights, SlicesOfOneStorageFollowByThemselves) {
  const Tensor flat = Tensor::zeros({12}, DType::bf16, GetParam());
  const Tensor first = flat.alias(flat.view().slice(0, 0, 6)),
               second = flat.alias(flat.view().slice(0, 6, 12));
  for (const Tensor& w : {first, second}) {
    MasterWeight::assign(w, Tensor::from(exact_, {6}, DType::f32, GetParam()),
                         MasterStorage::remainder);
  }
  weights_written({first, second});
  fill(first.view().slice(0, 0, 1), 0.5);
  Values expected = exact_;
  expected[0] = 0.5;
  EXPECT_EQ(exact_of(first), expected);
  EXPECT_EQ(exact_of(second), exact_);
}

TEST_P(MasterWeights, WritesOfSeveralThreadsAreFollowed) {
  const std::int64_t n = 64;
  const Values truth(n, static_cast<float>(1.1));
  const Tensor w = Tensor::empty({n}, DType::bf16, GetParam());
  MasterWeight::assign(w, Tensor::from(truth, {n}, DType::f32, GetParam()),
                       MasterStorage::remainder);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] { fill(w.view().slice(0, t * 8, t * 8 + 4), 0.5); });
  }
  for (std::thread& thread : threads) thread.join();
  Values expected = truth;
  for (std::size_t i = 0; i < 32; ++i) {
    if (i % 8 < 4) expected[i] = 0.5;
  }
  EXPECT_EQ(exact_of(w), expected);
}

TEST_P(MasterWeights, TheCopyOfAWeightLastsUntilItsMasterHasFollowed) {
  const auto bytes = [] {
    return core::memory_stats(GetParam()).of(core::MemoryCategory::workspace);
  };
  const Tensor w = weight({DType::bf16, MasterStorage::remainder});
  const std::size_t before = bytes();
  fill(w, 2.0);
  EXPECT_EQ(bytes() - before, w.nbytes());
  MasterWeight::of(w);
  EXPECT_EQ(bytes(), before);
}

TEST_P(MasterWeights, WritesThroughAPointerOfDataCountHoweverLongItIsKept) {
  if (GetParam().is_cuda()) GTEST_SKIP() << "writes through a host pointer";
  for (const bool before_the_master : {false, true}) {
    for (const MasterStorage storage : {MasterStorage::f32, MasterStorage::remainder}) {
      const Tensor w = Tensor::empty({6}, DType::bf16, GetParam());
      core::BFloat16* pointer = before_the_master ? w.data<core::BFloat16>() : nullptr;
      MasterWeight::assign(w, Tensor::from(exact_, {6}, DType::f32, GetParam()), storage);
      if (!before_the_master) pointer = w.data<core::BFloat16>();
      Values expected = exact_;
      for (std::size_t i = 0; i < 3; ++i) {
        pointer[i] = core::BFloat16(0.5F);
        expected[i] = 0.5;
        EXPECT_EQ(exact_of(w), expected) << before_the_master << i;
      }
    }
  }
}

TEST_P(MasterWeights, WritesOfWhoHasTheWeightByDlpackCount) {
  if (GetParam().is_cuda()) GTEST_SKIP() << "writes through a host pointer";
  const Tensor w = weight({DType::bf16, MasterStorage::f32});
  DLManagedTensor* const shared = core::to_dlpack(w);
  Values expected = exact_;
  for (std::size_t i = 0; i < 2; ++i) {
    static_cast<core::BFloat16*>(shared->dl_tensor.data)[i] = core::BFloat16(0.5F);
    expected[i] = 0.5;
    EXPECT_EQ(exact_of(w), expected) << i;
  }
  shared->deleter(shared);
}

TEST_P(MasterWeights, WhatAPointerChangedBeforeAKernelDidCountsToo) {
  if (GetParam().is_cuda()) GTEST_SKIP() << "writes through a host pointer";
  for (const MasterStorage storage : {MasterStorage::f32, MasterStorage::remainder}) {
    const Tensor w = weight({DType::bf16, storage});
    w.data<core::BFloat16>()[0] = core::BFloat16(0.5F);
    fill(w.view().slice(0, 1, 2), 2.0);
    Values expected = exact_;
    expected[0] = 0.5;
    expected[1] = 2.0;
    EXPECT_EQ(exact_of(w), expected);
  }
}

TEST_P(MasterWeights, WritesThroughARawPointerCountWhenTheyAreAnnounced) {
  if (GetParam().is_cuda()) GTEST_SKIP() << "writes through a host pointer";
  for (const HalfCase& half : kHalves) {
    const Tensor w = weight(half);
    w.view().bump_version();
    static_cast<std::uint16_t*>(w.raw_data())[0] = 0;
    Values expected = exact_;
    expected[0] = 0;
    EXPECT_EQ(exact_of(w), expected) << half.dtype;
  }
}

TEST_P(MasterWeights, OnceReportedAfterwardsAllRemaindersAreForgotten) {
  const Tensor w = weight({DType::bf16, MasterStorage::remainder});
  const Values rounded = w.to_vector<double>();
  w.storage()->bump_version();
  fill(w.view().slice(0, 0, 1), rounded[0]);  // too late to tell
  EXPECT_EQ(exact_of(w), rounded);
}

TEST_P(MasterWeights, TheExactValueIsNotWrittenByOthers) {
  for (const HalfCase& half : kHalves) {
    const Tensor w = weight(half);
    Tensor(w).set_name("fc.weight");
    MasterWeight::assign(w, Tensor::from(exact_, {6}, DType::f32, GetParam()), half.storage);
    const std::string said = message_of([&] { fill(MasterWeight::of(w)->tensor(), 0.0); });
    EXPECT_THAT(said,
                HasSubstr("[master] expected a write to the half weight fc.weight itself, got "
                          "one to its f32 value, which the weight would not follow"));
    EXPECT_THAT(said, HasSubstr("kernels::write_weight"));
    const Tensor out = exported_value(w);
    EXPECT_THROW(axpby(0.1, Tensor::zeros({6}, DType::f32, GetParam()), 0.9, out),
                 core::InvalidArgument);
    EXPECT_EQ(out.to_vector<double>(), exact_);
    EXPECT_EQ(exact_of(w), exact_);
  }
  const Tensor half = Tensor::full({3}, 0.5, DType::f16, GetParam());
  EXPECT_THROW(fill(exported_value(half), 0.0), core::InvalidArgument);
  const Tensor single = Tensor::full({3}, 0.5, DType::f32, GetParam());
  fill(exported_value(single), 2.0);
  EXPECT_EQ(single.to_vector<double>(), Values(3, 2.0));
}

TEST_P(MasterWeights, WhatWasAMasterMayBeWritten) {
  const Tensor w = weight(kHalves[0]);
  const Tensor master = MasterWeight::of(w)->tensor();
  MasterWeight::drop(w);
  fill(master, 2.0);
  EXPECT_EQ(master.to_vector<double>(), Values(6, 2.0));
}

INSTANTIATE_TEST_SUITE_P(Devices, MasterWeights, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
