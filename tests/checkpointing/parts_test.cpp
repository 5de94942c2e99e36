// Ready parts, and states that do not fit exactly.
#include "cairn/checkpointing/parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "checkpointing/temporary_folder.h"

namespace cairn::checkpointing {
namespace {

using core::DataError;
using core::InvalidArgument;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Parts, VariablesComeBack) {
  const TemporaryFolder dir;
  bool warm = true;
  int epoch = 3;
  std::int64_t samples = 1LL << 40;
  float rate = 0.1F;
  double best = 1.0 / 3;
  std::string name = "run";
  Variables all({{"warm", warm},
                 {"epoch", epoch},
                 {"samples", samples},
                 {"rate", rate},
                 {"best", best},
                 {"name", name}});
  TrainingState state({{"mine", all}});
  state.save(dir.string(), 1);
  warm = false, epoch = 0, samples = 0, rate = 0, best = 0, name = "";
  state.resume_latest(dir.string());
  EXPECT_TRUE(warm);
  EXPECT_EQ(epoch, 3);
  EXPECT_EQ(samples, 1LL << 40);
  EXPECT_EQ(rate, 0.1F);
  EXPECT_EQ(best, 1.0 / 3);
  EXPECT_EQ(name, "run");
}

TEST(Parts, VariablesThatDoNotFitAreAllNamedAndNoneChanges) {
  int count = 5;
  std::string text = "a";
  std::int64_t missing = 7;
  Variables variables({{"count", count}, {"text", text}, {"missing", missing}});
  StateDict state;
  state.set("count", std::int64_t{1} << 40);
  state.set("text", 1.5);
  state.set("other", 2.0);
  EXPECT_THAT(message_of<DataError>([&] { variables.load_state_dict(state); }),
              AllOf(HasSubstr("count"), HasSubstr("text"), HasSubstr("missing"),
                    HasSubstr("surplus: 'other'")));
  EXPECT_EQ(count, 5);
  EXPECT_EQ(text, "a");
  EXPECT_THROW(Variables({{"a.b", count}}), InvalidArgument);
  EXPECT_THROW(Variables({{"a", count}, {"a", text}}), InvalidArgument);
}

// A trainer's half weights, which an optimizer has given masters: the exact values come back,
// before and after there is a master to put them in.
TEST(Parts, HalfWeightsComeBackWithTheirExactValues) {
  const TemporaryFolder dir;
  std::vector<core::BFloat16> weight(3, core::BFloat16(1.0f));
  Tensor x = Tensor::wrap(weight, {3});
  x.set_requires_grad(true);
  kernels::MasterWeight::assign(x, Tensor::from<float>({1.001f, 2.002f, 3.003f}, {3}));
  Tensors part({{"w", x}});
  TrainingState state({{"weights", part}});
  state.save(dir.string(), 1);
  for (const bool has_master : {true, false}) {
    kernels::MasterWeight::drop(x);
    if (has_master) kernels::MasterWeight::make(x);
    kernels::fill(x, 9.0);
    state.resume_latest(dir.string());
    EXPECT_THAT(kernels::master_value(x).to_vector<float>(), ElementsAre(1.001f, 2.002f, 3.003f));
    EXPECT_EQ(weight[2].bits, core::BFloat16(3.003f).bits);
  }
}

// A trainer's own arrays, one of them a column, and a bf16 copy that a file of f32 fills.
TEST(Parts, ViewsOfForeignMemoryComeBack) {
  const TemporaryFolder dir;
  std::vector<float> weight = {1, 2, 3, 4, 5, 6}, other(6);
  const TensorView column(weight.data(), {3}, Strides{2}, DType::f32);
  Tensors saved({{"layer.0.weight", Tensor::wrap({weight.data(), {2, 3}, DType::f32})},
                 {"layer.0.column", Tensor::wrap(column)}});
  TrainingState({{"net", saved}}).save(dir.string(), 1);
  Tensor half = Tensor::zeros({3}, DType::bf16);
  Tensors loads({{"layer.0.weight", Tensor::wrap({other.data(), {2, 3}, DType::f32})},
                 {"layer.0.column", half}});
  TrainingState({{"net", loads}}).resume_latest(dir.string());
  EXPECT_EQ(other, weight);
  EXPECT_THAT(half.to_vector(), ElementsAre(1, 3, 5));
}

TEST(Parts, TensorsThatDoNotFitAreAllNamedAndNoneChanges) {
  const Tensor a = Tensor::zeros({2}), b = Tensor::zeros({3});
  Tensors tensors({{"a", a}, {"b", b}, {"c", Tensor::zeros({1})}});
  Tensors others({{"a", Tensor::full({2}, 1)}, {"b", Tensor::full({4}, 1)}, {"d.e", a}});
  EXPECT_THAT(message_of<DataError>([&] { tensors.load_state_dict(others.state_dict()); }),
              AllOf(HasSubstr("'b': expected f32 [3], got f32 [4]"), HasSubstr("missing: 'c'"),
                    HasSubstr("surplus: 'd.e'")));
  EXPECT_THAT(a.to_vector(), ElementsAre(0, 0));
  EXPECT_THROW(Tensors({{"a", a}, {"a", b}}), InvalidArgument);
  EXPECT_THROW(Tensors({{"a", a}, {"a.b", b}}), InvalidArgument);
  EXPECT_THROW(Tensors({{"a", Tensor()}}), InvalidArgument);
}

// ---- strict or not, under other names

struct TwoNets {
  explicit TwoNets(std::int64_t classes)
      : body(nn::Linear(4, 3), nn::ReLU()), head(nn::Linear(3, classes)) {}
  nn::Sequential body, head;
};

// Large enough for several threads within a save and a load, of tensors of one piece and of many.
TEST(Parts, SeveralThreadsWriteAndMapOneState) {
  const TemporaryFolder dir;
  const auto tensors_of = [](std::int64_t value) {
    NamedTensors tensors = {{"large", Tensor::full({9 << 18}, value, DType::f32, Device{})}};
    for (std::int64_t i = 0; i < 12; ++i) {
      tensors.push_back({core::str("t", i), Tensor::full({1 << 18}, value + i, DType::i64, {})});
    }
    return tensors;
  };
  const NamedTensors saved = tensors_of(7);
  saved[0].tensor.data<float>()[(9 << 18) - 1] = 0.5F;
  Tensors part(saved);
  TrainingState state({{"part", part}});
  state.save_async(dir.string(), 1);
  state.save(dir.string(), 2);
  EXPECT_THAT(find_damage(dir / "step-00000001"), ::testing::IsEmpty());
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&] {
      const NamedTensors loaded = tensors_of(0);
      Tensors own(loaded);
      TrainingState({{"part", own}}, {}, {.read_only = true}).resume_latest(dir.string());
      for (std::size_t i = 0; i < saved.size(); ++i) {
        EXPECT_EQ(std::memcmp(loaded[i].tensor.raw_data(), saved[i].tensor.raw_data(),
                              saved[i].tensor.nbytes()),
                  0)
            << saved[i].name;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
}

TEST(PartialLoad, TakesWhatFitsAndSaysWhatDoesNot) {
  const TemporaryFolder dir;
  TwoNets old(5), now(5);
  now.head.add(nn::Linear(5, 2));
  double best = 3;
  Variables mine({{"best", best}});
  TrainingState({{"body", old.body}, {"head", old.head}, {"gone", mine}}).save(dir.string(), 4);
  TrainingState state({{"body", now.body}, {"head", now.head}, {"mine", mine}});
  EXPECT_THROW(state.resume_latest(dir.string()), DataError);
  const auto before = now.head.parameters()[2].tensor.to_vector();
  const auto info = state.resume_latest(dir.string(), {.strict = false});
  ASSERT_TRUE(info);
  EXPECT_THAT(info->kept, ElementsAre("head.1.weight", "head.1.bias", "mine"));
  EXPECT_THAT(info->ignored, ElementsAre("gone"));
  EXPECT_EQ(now.body.parameters()[0].tensor.to_vector(),
            old.body.parameters()[0].tensor.to_vector());
  EXPECT_EQ(now.head.parameters()[0].tensor.to_vector(),
            old.head.parameters()[0].tensor.to_vector());
  EXPECT_EQ(now.head.parameters()[2].tensor.to_vector(), before);
}

TEST(PartialLoad, AnotherShapeIsAnErrorStill) {
  const TemporaryFolder dir;
  TwoNets old(5), now(6);
  TrainingState({{"head", old.head}}).save(dir.string(), 4);
  TrainingState state({{"head", now.head}});
  EXPECT_THAT(message_of<DataError>([&] { state.resume_latest(dir.string(), {.strict = false}); }),
              HasSubstr("0.weight"));
}

TEST(PartialLoad, AnotherOptimizersStateIsLeftOut) {
  const TemporaryFolder dir;
  TwoNets old(5), now(5);
  optim::FusedAdam adam(old.body.parameters(), {.lr = 0.5});
  optim::FusedSGD sgd(now.body.parameters(), {.lr = 0.25});
  TrainingState({{"body", old.body}, {"optimizer", adam}}).save(dir.string(), 4);
  TrainingState state({{"body", now.body}, {"optimizer", sgd}});
  EXPECT_THAT(message_of<DataError>([&] { state.resume_latest(dir.string()); }),
              HasSubstr("the state of a FusedAdam"));
  const auto info = state.resume_latest(dir.string(), {.strict = false});
  ASSERT_TRUE(info);
  EXPECT_THAT(info->kept, ElementsAre("optimizer"));
  EXPECT_THAT(info->ignored, ElementsAre("optimizer"));
  EXPECT_EQ(sgd.groups()[0].lr, 0.25);
  EXPECT_EQ(now.body.parameters()[0].tensor.to_vector(),
            old.body.parameters()[0].tensor.to_vector());
}

// What only looks like an optimizer's is loaded as anything else.
TEST(PartialLoad, AVariableCalledKindIsLoaded) {
  const TemporaryFolder dir;
  std::string kind = "warm-up";
  Variables mine({{"kind", kind}});
  TrainingState({{"mine", mine}}).save(dir.string(), 4);
  kind = "decay";
  TrainingState state({{"mine", mine}});
  EXPECT_THAT(state.resume_latest(dir.string(), {.strict = false})->kept, IsEmpty());
  EXPECT_EQ(kind, "warm-up");
}

TEST(PartialLoad, NamesAreMapped) {
  const TemporaryFolder dir;
  TwoNets old(5), now(5);
  TrainingState({{"body", old.body}, {"head", old.head}}).save(dir.string(), 4);
  TrainingState state({{"net", now.body}, {"top", now.head}});
  state.resume_latest(dir.string(), {.rename = {{"body", "net"}, {"head.0", "top.0"}}});
  EXPECT_EQ(now.body.parameters()[0].tensor.to_vector(),
            old.body.parameters()[0].tensor.to_vector());
  EXPECT_EQ(now.head.parameters()[1].tensor.to_vector(),
            old.head.parameters()[1].tensor.to_vector());
  EXPECT_THROW(state.resume_latest(dir.string(), {.rename = {{"body", "head"}}}), DataError);
}

TEST(PartialLoad, ABranchIsRenamedNotWhatBeginsAsItDoes) {
  const TemporaryFolder dir;
  std::int64_t first = 1, second = 2;
  Variables body({{"steps", first}}), body2({{"steps", second}});
  TrainingState({{"body", body}, {"body2", body2}}).save(dir.string(), 4);
  first = second = 0;
  TrainingState({{"net", body}, {"body2", body2}})
      .resume_latest(dir.string(), {.rename = {{"body", "net"}}});
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 2);
}

}  // namespace
}  // namespace cairn::checkpointing
