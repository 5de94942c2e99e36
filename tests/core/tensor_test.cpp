#include "cairn/core/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <thread>

#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Tensor, FactoriesFillEveryDType) {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i16, DType::i32,
                      DType::i64, DType::u8, DType::boolean}) {
    EXPECT_THAT(Tensor::zeros({3}, dtype).to_vector(), ElementsAre(0, 0, 0)) << dtype;
    EXPECT_THAT(Tensor::full({2}, 1, dtype).to_vector(), ElementsAre(1, 1)) << dtype;
    EXPECT_EQ(Tensor::empty({2, 3}, dtype).nbytes(), 6 * size_of(dtype)) << dtype;
  }
}

TEST(Tensor, FromConvertsValues) {
  const Tensor x = Tensor::from<double>({1.5, -2.25, 70000}, {3}, DType::f16);
  EXPECT_THAT(x.to_vector(), ElementsAre(1.5, -2.25, INFINITY));
  EXPECT_THAT(Tensor::from<bool>({true, false}, {2}).to_vector<int>(), ElementsAre(1, 0));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                Tensor::from<float>({1, 2}, {3});
              }),
              HasSubstr("[from] expected 3 values for shape [3], got 2"));
}

TEST(Tensor, EmptyAndScalarShapes) {
  const Tensor none = Tensor::zeros({0, 4});
  EXPECT_EQ(none.numel(), 0);
  EXPECT_TRUE(none.to_vector().empty());
  EXPECT_DOUBLE_EQ(Tensor::full({}, 2.5).item(), 2.5);
  EXPECT_THAT(message_of<InvalidArgument>([] { Tensor::zeros({2}).item(); }),
              HasSubstr("expected one element, got shape [2]"));
}

TEST(Tensor, RejectsImpossibleSizes) {
  EXPECT_THROW(Tensor::empty({-1}), InvalidArgument);
  EXPECT_THROW(Tensor::empty({std::int64_t{1} << 40, std::int64_t{1} << 40}), InvalidArgument);
  EXPECT_THROW(Tensor::empty_strided({2, 2}, {4, 1}, DType::f32, {}), InvalidArgument);
}

TEST(Tensor, UndefinedTensorSaysSo) {
  EXPECT_THAT(message_of<InvalidArgument>([] { Tensor().shape(); }),
              HasSubstr("expected a tensor, got an undefined one"));
}

TEST(Tensor, DataChecksTheDType) {
  EXPECT_THAT(message_of<InvalidArgument>([] { Tensor::zeros({2}).data<double>(); }),
              HasSubstr("[data] expected a tensor of f64, got f32 [2]"));
}

TEST(Tensor, AliasSharesMemoryAndStaysInside) {
  const Tensor x = Tensor::from<float>({0, 1, 2, 3, 4, 5}, {2, 3});
  const Tensor column = x.alias(x.view().select(1, 1));
  EXPECT_THAT(column.to_vector(), ElementsAre(1, 4));
  x.data<float>()[4] = 40;
  EXPECT_THAT(column.to_vector(), ElementsAre(1, 40));
  TensorView beyond = x.view();
  beyond.data = x.data<float>() + 1;
  EXPECT_THROW(x.alias(beyond), InvalidArgument);
}

// A view made while the memory lay elsewhere than at first, and asked for when it lies elsewhere
// again.
TEST(Tensor, AViewOfMemoryThatComesAndGoesFollowsIt) {
  const Tensor x = Tensor::empty({2, 3});
  const Tensor second = Tensor::from<float>({7, 1, 2, 3, 4, 5}, {2, 3}),
               third = Tensor::from<float>({8, 1, 2, 3, 4, 5}, {2, 3});
  x.storage()->make_returnable([] {});
  x.storage()->set_memory(second.storage());
  const Tensor row = x.alias(x.view().select(0, 0));
  EXPECT_EQ(row.to_vector(), (std::vector<double>{7, 1, 2}));
  x.storage()->set_memory(third.storage());
  EXPECT_EQ(row.to_vector(), (std::vector<double>{8, 1, 2}));
}

TEST(Tensor, SetDataKeepsNameAndRequiresGrad) {
  Tensor x = Tensor::zeros({2});
  const Tensor handle = x;
  x.set_requires_grad(true).set_name("fc.weight");
  x.set_grad(Tensor::zeros({2}));
  x.set_data(Tensor::full({2}, 3, DType::bf16));
  EXPECT_EQ(handle.dtype(), DType::bf16);
  EXPECT_TRUE(handle.requires_grad());
  EXPECT_EQ(handle.name(), "fc.weight");
  EXPECT_FALSE(handle.grad().defined());
  EXPECT_THROW(x.set_data(Tensor::zeros({2}, DType::i64)), InvalidArgument);
}

TEST(Tensor, MasterStaysWithItsDType) {
  Tensor x = Tensor::zeros({2}, DType::f16);
  x.attachments().master = std::make_shared<Tensor>(Tensor::zeros({2}));
  x.set_data(Tensor::zeros({2}, DType::f16));
  EXPECT_TRUE(x.attachments().master);
  x.set_data(Tensor::zeros({2}));
  EXPECT_FALSE(x.attachments().master);
}

TEST(Tensor, GradientOfASlotCountsOnlyOnceWritten) {
  const Tensor arena = Tensor::zeros({4});
  Tensor x = Tensor::zeros({2});
  GradientSlot& slot = x.gradient_slot();
  slot.place(arena.alias(arena.view().slice(0, 0, 2)));
  EXPECT_FALSE(x.grad().defined());
  slot.mark_written();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_THROW(x.set_grad(Tensor::zeros({2})), InvalidArgument);
  x.clear_grad();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_TRUE(slot.memory().defined());
}

TEST(Tensor, RequiresGradNeedsAFloat) {
  EXPECT_THROW(Tensor::zeros({2}, DType::i32).set_requires_grad(true), InvalidArgument);
  EXPECT_THROW(Tensor::zeros({2}).set_grad(Tensor::zeros({3})), InvalidArgument);
}

TEST(Tensor, WrapDropsItsOwnerWithTheLastTensor) {
  auto owner = std::make_shared<std::vector<float>>(6, 2.0f);
  const std::weak_ptr<std::vector<float>> watch = owner;
  Tensor x = Tensor::wrap({owner->data(), {2, 3}, DType::f32}, owner);
  owner = nullptr;
  const Tensor part = x.alias(x.view().select(0, 1));
  x = {};
  EXPECT_FALSE(watch.expired());
  EXPECT_THAT(part.to_vector(), ElementsAre(2, 2, 2));
}

TEST(Tensor, AWrappedVectorThatMovesIsSaid) {
  std::vector<float> memory(6, 2.0f);
  Tensor x = Tensor::wrap(memory, {2, 2}, 1);
  x.set_name("weight");
  memory[4] = 7;
  EXPECT_THAT(x.to_vector(), ElementsAre(2, 2, 2, 7));
  EXPECT_EQ(x.raw_data(), memory.data() + 1);
  const Tensor part = x.alias(x.view().select(0, 1));
  const std::vector<float> former = std::move(memory);  // the elements are another vector's now
  for (const Tensor& moved : {x, part}) {
    EXPECT_THROW(moved.view(), InvalidArgument);
    EXPECT_THROW(moved.to_vector(), InvalidArgument);
  }
  try {
    x.view();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the elements of weight [2, 2]"));
  }
  memory.assign(100000, 1.0f);
  EXPECT_THROW(x.view(), InvalidArgument);
  EXPECT_THROW(Tensor::wrap(memory, {100000}, 1), InvalidArgument);
  EXPECT_THROW(Tensor::wrap(memory, {1}, 100001), InvalidArgument);
  EXPECT_EQ(Tensor::wrap(memory, {0}, 100000).numel(), 0);
}

TEST(Tensor, ViewsCountWritesToTheirStorage) {
  const Tensor x = Tensor::zeros({2, 3, 4}), other = Tensor::zeros({2, 3, 4});
  const TensorView v = x;
  std::uint64_t version = x.storage()->version();
  for (const TensorView& part :
       {v, v.slice(1, 0, 2), v.select(0, 1), v.unsqueeze(0), v.transpose(0, 2),
        v.permute({2, 0, 1}), v.reshape({6, -1}), v.expand({5, 2, 3, 4}), x.alias(v).view()}) {
    part.bump_version();
    EXPECT_EQ(x.storage()->version(), ++version);
  }
  copy_bytes(other, x);
  EXPECT_EQ(x.storage()->version(), version + 1);
  EXPECT_EQ(other.storage()->version(), 0u);
}

TEST(Tensor, ForeignViewsCountNothing) {
  std::vector<float> memory(4);
  const TensorView foreign(memory.data(), {4}, DType::f32);
  foreign.bump_version();
  EXPECT_EQ(foreign.version, nullptr);
  const Tensor wrapped = Tensor::wrap(foreign);
  wrapped.view().bump_version();
  EXPECT_EQ(wrapped.storage()->version(), 1u);
}

TEST(Tensor, NoWriteOfSeveralThreadsIsLost) {
  const Tensor x = Tensor::zeros({2});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([view = x.view()] {
      for (int i = 0; i < 5000; ++i) view.bump_version();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(x.storage()->version(), 20000u);
}

class Told : public WriteGuard {
 public:
  explicit Told(const Storage& storage, bool refuses = false)
      : storage_(storage), refuses_(refuses) {}
  void before_write() override {
    versions.push_back(storage_.version());
    if (refuses_) fail("told", "expected no write, got one");
  }
  void pointer_given() override { ++pointers; }

  std::vector<std::uint64_t> versions;  // when it was told
  int pointers = 0;

 private:
  const Storage& storage_;
  bool refuses_;
};

TEST(Tensor, AGuardIsToldBeforeEachWriteWhileItLives) {
  const Tensor x = Tensor::zeros({4}), other = Tensor::full({4}, 2.0);
  auto first = std::make_shared<Told>(*x.storage()), second = std::make_shared<Told>(*x.storage());
  x.storage()->version_counter().add_guard(first);
  x.storage()->version_counter().add_guard(second);
  copy_bytes(other, x);
  x.alias(x.view().slice(0, 0, 2)).view().bump_version();
  x.storage()->bump_version();  // that has happened
  EXPECT_EQ(first->versions, (std::vector<std::uint64_t>{0, 1}));
  first = nullptr;
  copy_bytes(other, x);
  EXPECT_EQ(second->versions, (std::vector<std::uint64_t>{0, 1, 3}));
}

TEST(Tensor, AGuardMayRefuseAWrite) {
  const Tensor x = Tensor::zeros({4}), other = Tensor::full({4}, 2.0);
  const auto guard = std::make_shared<Told>(*x.storage(), true);
  x.storage()->version_counter().add_guard(guard);
  EXPECT_THROW(copy_bytes(other, x), InvalidArgument);
  EXPECT_EQ(x.to_vector(), std::vector<double>(4, 0.0));
  EXPECT_EQ(x.storage()->version(), 0u);
}

TEST(Tensor, AGuardHearsOfPointersThatWereGivenBeforeItCame) {
  const Tensor x = Tensor::zeros({4});
  const auto early = std::make_shared<Told>(*x.storage()),
             late = std::make_shared<Told>(*x.storage());
  x.storage()->version_counter().add_guard(early);
  EXPECT_EQ(x.raw_data(), x.data<float>());
  x.storage()->version_counter().add_guard(late);
  EXPECT_EQ(early->pointers, 1);
  EXPECT_EQ(late->pointers, 1);
}

TEST(Tensor, PrintsAbridgedValues) {
  std::ostringstream out;
  out << Tensor::from<float>({1, 2.5, -3, 4}, {2, 2}) << '\n'
      << Tensor::zeros({100, 9}) << '\n'
      << Tensor() << '\n'
      << Tensor::full({}, 1, DType::boolean);
  EXPECT_THAT(out.str(), HasSubstr("[[1, 2.5],\n [-3, 4]] [2, 2] f32 cpu:0"));
  EXPECT_THAT(out.str(), HasSubstr("[0, 0, 0, ..., 0, 0, 0],\n ...,\n"));
  EXPECT_THAT(out.str(), HasSubstr("Tensor (undefined)"));
  EXPECT_THAT(out.str(), HasSubstr("true [] bool"));
}

TEST(Tensor, CopyBytesNeedsEqualLayout) {
  const Tensor x = Tensor::from<float>({1, 2, 3, 4}, {2, 2});
  const Tensor y = Tensor::empty({2, 2});
  copy_bytes(x, y);
  EXPECT_EQ(y.to_vector(), x.to_vector());
  EXPECT_THROW(copy_bytes(x.view().transpose(0, 1), y), InvalidArgument);
  EXPECT_THROW(copy_bytes(x, Tensor::empty({2, 2}, DType::i32)), InvalidArgument);
  copy_bytes(x.view().transpose(0, 1), y.view().transpose(0, 1));
}

}  // namespace
}  // namespace cairn::core
