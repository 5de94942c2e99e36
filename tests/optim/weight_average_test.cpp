// Averages of weights: the formula, the exact values that it is made of, and the scope that puts
// them in.
#include "cairn/optim/weight_average.h"

#include <gmock/gmock.h>

#include <functional>

#include "support.h"

namespace cairn::optim {
namespace {

using test::said_by;
using testing::HasSubstr;

class Averages : public testing::TestWithParam<Device> {
 protected:
  /// Of every kind: f32, f16 and bf16 with masters, bf16 with a remainder, f16 without.
  NamedTensors weights() const {
    const auto make = [](const char* name, std::uint64_t seed, DType dtype) {
      return make_parameter(name, {37, 11}, seed, dtype, GetParam());
    };
    NamedTensors all = {make("f32", 1, DType::f32), make("block.f16", 2, DType::f16),
                        make("block.bf16", 3, DType::bf16), make("split", 4, DType::bf16),
                        make("half", 5, DType::f16)};
    for (std::size_t i = 1; i < 4; ++i) {
      kernels::MasterWeight::assign(all[i].tensor,
                                    test::random_tensor({37, 11}, DType::f32, GetParam(), 10 + i),
                                    i == 3 ? MasterStorage::remainder : MasterStorage::f32);
    }
    return all;
  }
};

/// Other values; what halves without a master hold, rounded.
void move_on(const NamedTensors& weights, std::uint64_t seed) {
  for (const auto& [name, tensor] : weights) {
    const Tensor next = test::random_tensor(tensor.shape(), DType::f32, tensor.device(), seed++);
    kernels::write_weight(tensor, next, false);
  }
}

/// Eight updates, of which the n-th makes it keeps(n) average + (1 - keeps(n)) weight.
void expect_updates(const NamedTensors& weights, const WeightAverageOptions& options,
                    const std::function<double(int)>& keeps) {
  WeightAverage average(weights, options);
  std::vector<Values> expected = exact(weights);
  for (int n = 0; n < 8; ++n) {
    move_on(weights, 20 + 10 * static_cast<std::uint64_t>(n));
    average.update();
    for (std::size_t k = 0; k < weights.size(); ++k) {
      const Values now = exact(weights[k].tensor);
      for (std::size_t i = 0; i < now.size(); ++i) {
        expected[k][i] = keeps(n) * expected[k][i] + (1 - keeps(n)) * now[i];
      }
    }
  }
  expect_weights(average.averages(), expected, 1e-6, 1e-6);
  for (const auto& [name, tensor] : average.averages()) EXPECT_EQ(tensor.dtype(), DType::f32);
}

TEST_P(Averages, BeginWithTheWeightsAndTheFirstUpdateCopiesThem) {
  const NamedTensors all = weights();
  WeightAverage average(all, {.decay = 0.9});
  EXPECT_EQ(values(average.averages()), exact(all));
  move_on(all, 20);
  average.update();
  EXPECT_EQ(values(average.averages()), exact(all));
  EXPECT_EQ(average.updates(), 1);
}

TEST_P(Averages, DecayExponentially) {
  expect_updates(weights(), {.decay = 0.9}, [](int n) { return n == 0 ? 0.0 : 0.9; });
}

TEST_P(Averages, CountAlike) {
  expect_updates(weights(), {.equal = true}, [](int n) { return n / (n + 1.0); });
}

TEST_P(Averages, SeeStepsThatAHalfWeightDoesNotShow) {
  for (const MasterStorage storage : {MasterStorage::f32, MasterStorage::remainder}) {
    const NamedTensor weight{"w", Tensor::full({8}, 1.0, DType::bf16, GetParam())};
    kernels::MasterWeight::make(weight.tensor, storage);
    WeightAverage average({weight}, {.equal = true});
    for (int step = 1; step <= 10; ++step) {
      kernels::write_weight(weight.tensor,
                            Tensor::full({8}, 1.0 - step * 1e-4, DType::f32, GetParam()), false);
      average.update();
    }
    EXPECT_EQ(values(weight.tensor), Values(8, 1.0));
    test::expect_close(average.averages()[0].tensor, Values(8, 1.0 - 5.5e-4), 1e-7, 0);
  }
}

/// What lies in masters, as it is kept there.
std::vector<Values> masters(const NamedTensors& weights) {
  std::vector<Values> all;
  for (const NamedTensor& weight : weights) {
    const auto* master = kernels::MasterWeight::of(weight.tensor);
    all.push_back(master ? values(master->tensor()) : Values());
  }
  return all;
}

TEST_P(Averages, InUseAreTheWeightsAndTheirEndRestoresEveryBit) {
  const NamedTensors all = weights();
  WeightAverage average(all);
  move_on(all, 20);
  average.update();
  const std::vector<Values> averaged = values(average.averages());
  move_on(all, 40);
  const auto before = values(all), before_exact = exact(all), before_kept = masters(all);
  {
    const auto in_use = average.use();
    for (std::size_t k = 0; k + 1 < all.size(); ++k)
      EXPECT_EQ(exact(all[k].tensor), averaged[k]) << all[k].name;
    EXPECT_EQ(values(all[4].tensor), rounded(averaged[4], DType::f16));
    EXPECT_EQ(values(all[1].tensor), rounded(averaged[1], DType::f16));
  }
  EXPECT_EQ(values(all), before);
  EXPECT_EQ(exact(all), before_exact);
  EXPECT_EQ(masters(all), before_kept);
  EXPECT_EQ(values(average.averages()), averaged);
}

TEST_P(Averages, InUseBetweenStepsChangeNoTraining) {
  const NamedTensors a = weights(), b = weights();
  FusedAdam plain(a, {.lr = 1e-3}), looked_at(b, {.lr = 1e-3});
  WeightAverage average(b, {.decay = 0.9});
  for (std::uint64_t step = 0; step < 5; ++step) {
    for (const NamedTensors* all : {&a, &b}) write_gradients(*all, 7 * step);
    { const auto in_use = average.use(); }
    expect_applied(plain.step());
    if (looked_at.step().applied) average.update();
  }
  EXPECT_EQ(exact(a), exact(b));
}

TEST_P(Averages, ContinueFromTheirStateBitForBit) {
  const NamedTensors a = weights(), b = weights();
  WeightAverage whole(a, {.decay = 0.9}), second(b, {.decay = 0.9});
  move_on(a, 20);
  whole.update();
  const StateDict file = snapshot(whole.state_dict());
  EXPECT_EQ(file.dict("values").dict("block").tensor("f16").dtype(), DType::f32);
  second.load_state_dict(file);
  EXPECT_EQ(second.updates(), 1);
  for (const NamedTensors* all : {&a, &b}) move_on(*all, 30);
  whole.update();
  second.update();
  EXPECT_EQ(values(whole.averages()), values(second.averages()));
}

TEST_P(Averages, BuffersAreAveragedIfTheyAreNamedAndCountsAreNot) {
  const Tensor mean = Tensor::full({4}, 1.0, DType::f32, GetParam()),
               count = Tensor::full({1}, 3, DType::i64, GetParam());
  WeightAverage average({{"bn.running_mean", mean}, {"bn.batches", count}}, {.decay = 0.5});
  average.update();
  kernels::fill(mean, 3.0);
  kernels::fill(count, 4);
  average.update();
  {
    const auto in_use = average.use();
    EXPECT_EQ(values(mean), Values(4, 2.0));
    EXPECT_EQ(values(count), Values(1, 4.0));
  }
  EXPECT_EQ(values(mean), Values(4, 3.0));
  EXPECT_EQ(average.averages().size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Devices, Averages, testing::ValuesIn(test::devices()), test::device_name);

TEST(AveragesErrors, SayWhatIsWrong) {
  const Tensor w = Tensor::zeros({2}), wide = Tensor::zeros({2}, DType::f64);
  const auto refusal = [](const NamedTensors& weights, const WeightAverageOptions& options = {}) {
    return message_of([&] { WeightAverage(weights, options); });
  };
  EXPECT_EQ(refusal({{"w", w}}, {.decay = 1.0}), "[average] expected a decay in [0, 1), got 1");
  EXPECT_EQ(refusal({{"w", w}, {"v", w}}), "[average] expected each weight once, got 'v' again");
  EXPECT_THAT(refusal({{"w", wide}}), HasSubstr("got 'w' of f64"));
  EXPECT_THAT(refusal({}), HasSubstr("got none (model.parameters())"));
  WeightAverage average({{"w", w}});
  const auto in_use = average.use();
  EXPECT_THAT(message_of([&] { average.update(); }), HasSubstr("update() after the scope"));
  EXPECT_THAT(message_of([&] { (void)average.use(); }), HasSubstr("got a second use()"));
}

TEST(AveragesErrors, AStateThatDiffersIsNamedAndChangesNothing) {
  WeightAverage average({{"w", Tensor::full({2}, 1.0)}, {"v", Tensor::full({2}, 1.0)}});
  WeightAverage other({{"w", Tensor::full({3}, 2.0)}, {"u", Tensor::full({2}, 2.0)}});
  EXPECT_THAT(message_of<core::DataError>([&] { average.load_state_dict(other.state_dict()); }),
              HasSubstr("'w' of shape [3] f32 instead of [2] f32; no 'v'; 'u', which is not "
                        "averaged (nothing was changed)"));
  EXPECT_EQ(values(average.averages()[0].tensor), Values(2, 1.0));
}

TEST(AveragesErrors, WhatIsWrittenWhileTheyAreInUseIsUndoneWithAWord) {
  const Tensor w = Tensor::full({2}, 1.0);
  WeightAverage average({{"fc.w", w}});
  const std::string said = said_by([&] {
    const auto in_use = average.use();
    kernels::fill(w, 5.0);
  });
  EXPECT_THAT(said, HasSubstr("'fc.w' was written"));
  EXPECT_EQ(values(w), Values(2, 1.0));
}

TEST(AveragesErrors, AWeightThatIsCastWhileTheyAreInUseIsNamed) {
  Tensor w = Tensor::full({2}, 1.0), v = Tensor::full({2}, 1.0);
  WeightAverage average({{"w", w}, {"v", v}});
  kernels::fill(average.averages()[1].tensor, 7.0);
  auto in_use = average.use();
  w.set_data(Tensor::full({2}, 3.0, DType::f16));
  EXPECT_THAT(message_of([&] { in_use.restore(); }), HasSubstr("got 'w', which was cast"));
  EXPECT_EQ(values(w), Values(2, 3.0));
  EXPECT_EQ(values(v), Values(2, 1.0));
}

}  // namespace
}  // namespace cairn::optim
