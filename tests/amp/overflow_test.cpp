// What is told of overflows: parameter, rank, kind, count; the history; the stop; the fall-back.
#include <gmock/gmock.h>

#include <tuple>

#include "support.h"
#include "support/fake_world.h"

namespace cairn::amp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Rank 0 of a world whose other ranks say what the test wants.
World world_of(int ranks, decltype(test::FakeLink::all) all) {
  const auto link = std::make_shared<test::FakeLink>();
  link->reduces = false;
  link->all = std::move(all);
  return {0, ranks, link};
}

struct Poison {
  std::string parameter;
  std::int64_t element = 0;
  double value = kInf;
};

/// A classifier at O2 of whose gradients elements are overwritten.
struct Poisoned : Classifier<> {
  explicit Poisoned(const Options& options = {}) : Classifier(at(OptLevel::O2, options)) {
    model.eval();
  }
  optim::StepResult step(const std::vector<Poison>& all = {}) {
    precision.backward(loss_of(model, make_batch(1)));
    for (const Poison& poison : all) {
      for (const NamedTensor& p : model.parameters()) {
        if (p.name != poison.parameter) continue;
        test::set_element(p.tensor.gradient_slot().memory(), poison.element, poison.value);
      }
    }
    return precision.step();
  }
};

TEST(Overflow, NamesEveryParameterWithItsCounts) {
  Poisoned run;
  const optim::StepResult result =
      run.step({{"0.weight", 3}, {"0.weight", 5}, {"0.weight", 7, kNaN}, {"3.bias", 0, kNaN}});
  EXPECT_EQ(result.culprit, "0.weight");
  EXPECT_EQ(result.reason,
            "inf and NaN in the gradient of 0.weight (3 elements), and 1 more parameter; loss "
            "scale 65536 -> 32768");
  const Overflow overflow = run.precision.overflows().back();
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> culprits;
  for (const Culprit& c : overflow.culprits) culprits.emplace_back(c.parameter, c.inf, c.nan);
  EXPECT_THAT(culprits, ElementsAre(std::tuple("0.weight", 2, 1), std::tuple("3.bias", 0, 1)));
  EXPECT_EQ(overflow.step, 1);
  EXPECT_EQ(overflow.loss_scale, 65536.0);
}

TEST(Overflow, RanksAreTold) {
  const auto told = [](std::vector<int> ranks) {
    Overflow overflow;
    for (const int rank : ranks) overflow.culprits.push_back({"w", rank, 1, 0});
    return overflow.describe(3);
  };
  EXPECT_EQ(told({2}), "inf in the gradient of w (1 element) on rank 2");
  EXPECT_EQ(told({0, 2}), "inf in the gradient of w (1 element) on ranks 0 and 2");
  EXPECT_EQ(told({0, 1, 2}), "inf in the gradient of w (1 element) on every rank");
}

TEST(Overflow, ARankIsNamedAndAllSkipTogether) {
  Poisoned run({.world = world_of(3, [](const std::string& own) {
                  const auto bad = test::step_report(own, {{"3.weight", 0, 4}});
                  return std::vector{own, test::step_report(own, {}), bad};
                })});
  const auto before = run.everything();
  const optim::StepResult result = run.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.reason,
            "NaN in the gradient of 3.weight (4 elements) on rank 2; loss scale 65536 -> 32768");
  EXPECT_EQ(run.precision.overflows().back().culprits[0].rank, 2);
  EXPECT_EQ(run.everything(), before);
}

TEST(Overflow, EveryRankSaysTheSame) {
  std::vector<std::string> said(2);
  for (int round = 0; round < 2; ++round) {  // first what each says, then what each hears
    for (const int rank : {0, 1}) {
      const auto exchange = [&, rank](const std::string& value, std::string_view name) {
        if (name == "amp's options") return std::vector<std::string>{value};
        said[static_cast<std::size_t>(rank)] = value;
        std::vector<std::string> all = said;
        for (std::string& text : all) text = text.empty() ? value : text;
        return all;
      };
      Poisoned run({.world = {rank, 2, exchange}});
      const optim::StepResult result = rank == 1 ? run.step({{"0.bias"}}) : run.step();
      if (round == 0) continue;
      EXPECT_FALSE(result.applied);
      EXPECT_EQ(result.reason,
                "inf in the gradient of 0.bias (1 element) on rank 1; loss scale 65536 -> 32768");
    }
  }
}

TEST(Overflow, GradientsSummedOverRanksAccuseOnlyWhoseOwnWereNotFinite) {
  for (const bool guilty : {true, false}) {
    const auto link = std::make_shared<test::FakeLink>();
    link->nonfinite = std::vector<core::NonFinite>();
    if (guilty) link->nonfinite->push_back({"3.weight", 2, 0});
    link->all = [](const std::string& value) {  // the other's were finite before the sum
      return std::vector{test::step_report(value, {}, {{"0.weight", 9, 0}}), value};
    };
    Poisoned run({.world = {1, 2, link}});
    const std::string reason = run.step({{"0.weight"}}).reason;
    EXPECT_THAT(reason, guilty ? HasSubstr("3.weight (2 elements) on rank 1")
                               : HasSubstr("0.weight (9 elements) in the sum over ranks"));
  }
}

TEST(Overflow, NonsenseFromARankIsAnError) {
  Poisoned run({.world = world_of(2, [](const std::string& own) {
                  return std::vector<std::string>{own, "culprit"};
                })});
  EXPECT_THROW(run.step(), core::CommunicationError);
}

TEST(Overflow, TheHistoryKeepsTheLast) {
  Poisoned run({.overflow_history = 3});
  for (int step = 0; step < 5; ++step) EXPECT_FALSE(run.step({{"0.bias"}}).applied);
  const std::vector<Overflow> last = run.precision.overflows();
  ASSERT_EQ(last.size(), 3u);
  EXPECT_EQ(last[0].step, 3);
  EXPECT_EQ(last[2].loss_scale, 4096.0);
  const std::string table = overflow_report(last);
  EXPECT_THAT(table, HasSubstr("       5     0        4096  inf in the gradient of 0.bias"));
  EXPECT_EQ(overflow_report({}), "no overflows\n");
}

TEST(Collapse, NamesWhatOverflowedEachTime) {
  Poisoned run({.scaler = {.init_scale = 4}, .collapse_after = 3});
  EXPECT_FALSE(run.step({{"0.weight"}}).applied);  // 4 -> 2
  EXPECT_FALSE(run.step({{"0.weight"}}).applied);  // 2 -> 1
  EXPECT_FALSE(run.step({{"0.bias"}, {"3.bias"}}).applied);
  EXPECT_FALSE(run.step({{"3.bias"}, {"0.weight"}}).applied);
  const auto before = run.everything();
  try {
    EXPECT_FALSE(run.step({{"3.bias", 0, kNaN}}).applied);
    FAIL() << "no LossScaleCollapse";
  } catch (const LossScaleCollapse& collapse) {
    EXPECT_THAT(collapse.parameters(), ElementsAre("3.bias"));
    EXPECT_THAT(collapse.what(), HasSubstr("3 overflows in a row"));
    EXPECT_THAT(collapse.what(), HasSubstr("gradients of 3.bias overflowed each time"));
  }
  EXPECT_EQ(run.everything(), before);
  EXPECT_TRUE(run.step().applied);  // the handle still works
}

TEST(Collapse, ACleanStepStartsTheCountAnew) {
  Poisoned run({.loss_scale = 8, .collapse_after = 2});
  for (int round = 0; round < 4; ++round) {
    EXPECT_FALSE(run.step({{"0.bias"}}).applied);
    EXPECT_TRUE(run.step().applied);
  }
}

/// Two linear layers; the first one's result overflows f16.
nn::Sequential overflowing_model() {
  manual_seed(3);
  nn::Sequential model(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 4));
  kernels::fill(model.parameters()[0].tensor, 2e4);
  kernels::fill(model.parameters()[2].tensor, 1e-6);
  return model;
}

const OptLevel kHalfLevels[] = {OptLevel::O1, OptLevel::O2, OptLevel::O3};

/// Trains this model with layers that may fall back.
struct FallingBack {
  FallingBack(nn::Module& model, OptLevel level, LossScalerOptions scaler = {})
      : optimizer(model.parameters(), {.lr = 1e-12}),
        precision(initialize(model, optimizer,
                             {.opt_level = level, .scaler = scaler, .fallback_after = 2})) {}
  optim::FusedSGD optimizer;
  Amp precision;
};

TEST(Fallback, ALayerThatKeepsOverflowingRunsInF32) {
  for (const OptLevel level : kHalfLevels) {
    SCOPED_TRACE(name(level));
    nn::Sequential model = overflowing_model(), other = overflowing_model();
    const auto loss_of = [](nn::Sequential& model) {
      const Tensor y = autograd::to(model(Tensor::full({4, 8}, 1.0)), DType::f32);
      return autograd::mse_loss(y, Tensor::zeros({4, 4}));
    };
    FallingBack run(model, level), resumed(other, level);
    optim::StepResult result;
    std::string reason;
    for (int step = 0; step < 6; ++step) {
      run.precision.backward(loss_of(model));
      result = run.precision.step();
      reason += result.reason;
    }
    EXPECT_THAT(run.precision.fp32_layers(), testing::Contains("0"));
    EXPECT_THAT(reason, HasSubstr("runs in f32 from now on"));
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(model.parameters()[0].tensor.dtype(), DType::f32);
    const bool weights_half = level != OptLevel::O1;
    EXPECT_EQ(model.parameters()[4].tensor.dtype(), weights_half ? DType::f16 : DType::f32);

    resumed.precision.load_state_dict(snapshot(run.precision.state_dict()));
    EXPECT_EQ(resumed.precision.fp32_layers(), run.precision.fp32_layers());
    EXPECT_TRUE(std::isfinite(loss_of(other).item()));
  }
}

/// A layer's weight is used again, beside a bias of the model's own.
class TiedNet : public nn::Module {
 public:
  TiedNet()
      : layer_(add_module("layer", nn::Linear(4, 4, {.bias = false}))),
        bias_(add_parameter("bias", Tensor::zeros({4}))) {
    kernels::fill(layer_->weight(), 2e4);
  }
  std::string kind() const override { return "TiedNet"; }
  Tensor forward(const Tensor& x) override {
    const Tensor h = autograd::affine((*layer_)(x), 1e-6, 0.0);
    return autograd::linear(h, layer_->weight(), bias_);
  }

 private:
  std::shared_ptr<nn::Linear> layer_;
  Tensor bias_;
};

TEST(Fallback, TiedWeightsKeepWorking) {
  for (const OptLevel level : kHalfLevels) {
    SCOPED_TRACE(name(level));
    TiedNet model;
    FallingBack run(model, level, {.init_scale = 1});
    bool applied = false;
    for (int step = 0; step < 8; ++step) {
      const Tensor y = autograd::to(model(Tensor::full({2, 4}, 1.0)), DType::f32);
      run.precision.backward(autograd::mean(autograd::affine(y, 1e-6, 0.0)));
      applied = run.precision.step().applied;
    }
    EXPECT_TRUE(applied);
    EXPECT_THAT(run.precision.fp32_layers(), ElementsAre("layer"));
  }
}

TEST(Fallback, AScaleThatIsTooHighIsNoReason) {
  Poisoned run({.fallback_after = 2});
  for (int step = 0; step < 6; ++step) EXPECT_FALSE(run.step({{"3.weight"}}).applied);
  EXPECT_TRUE(run.precision.fp32_layers().empty());
}

TEST(State, ReadsApexsStateAndChecksTheNumberOfScalers) {
  Poisoned run;
  StateDict apex;
  StateDict& scaler = apex.make_dict("loss_scaler0");
  scaler.set("loss_scale", 512.0);
  scaler.set("unskipped", std::int64_t{3});
  run.precision.load_state_dict(apex);
  EXPECT_EQ(run.precision.loss_scale(), 512.0);
  EXPECT_EQ(run.precision.apex_state_dict().dict("loss_scaler0").integer("unskipped"), 3);
  run.precision.load_state_dict(run.precision.scaler().torch_state_dict());
  EXPECT_EQ(run.precision.loss_scale(), 512.0);
  apex.set("loss_scaler1", scaler);
  EXPECT_THROW(run.precision.load_state_dict(apex), core::DataError);
  EXPECT_THROW(run.precision.load_state_dict(StateDict()), core::DataError);
  StateDict damaged = run.precision.state_dict();
  damaged.make_dict("loss_scaler0").set("loss_scale", -1.0);
  EXPECT_THROW(run.precision.load_state_dict(damaged), core::DataError);
  EXPECT_EQ(run.precision.loss_scale(), 512.0);
}

}  // namespace
}  // namespace cairn::amp
