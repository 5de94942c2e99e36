// What is told of overflows: parameter, rank, kind, count; the history; the stop; the fall-back.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/fake_world.h"

namespace cairn::amp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kOverflowInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Rank 0 of a world whose other ranks say what the test wants.
using Say = std::function<std::string(const std::string& own)>;
World world_of(std::vector<Say> others) {
  return {0, static_cast<int>(others.size()) + 1,
          [others](const std::string& value, std::string_view name) {
            std::vector<std::string> all{value};
            if (name == "amp's options") return all;
            for (const Say& say : others) all.push_back(say(value));
            return all;
          }};
}

struct Poisoned {
  explicit Poisoned(Options options, OptLevel level = OptLevel::O2) {
    options.opt_level = level;
    precision = std::make_unique<Amp>(initialize(model, optimizer, options));
    model.eval();
  }
  /// A backward of one batch, then these elements of these gradients are overwritten.
  optim::StepResult step_with(
      const std::vector<std::tuple<std::string, std::size_t, float>>& poison) {
    precision->backward(loss_of(model, make_batch(1)));
    for (const auto& [name, index, value] : poison) {
      for (const NamedTensor& p : model.parameters()) {
        if (p.name != name) continue;
        const Tensor one =
            p.tensor.gradient_slot().memory().alias(p.tensor.gradient_slot().memory().view());
        std::vector<double> all = values(one);
        all[index] = value;
        kernels::copy(Tensor::from(all, one.shape(), one.dtype()), one);
      }
    }
    return precision->step();
  }

  nn::Sequential model = make_model();
  optim::FusedAdam optimizer{model.parameters()};
  std::unique_ptr<Amp> precision;
};

TEST(Overflow, NamesEveryParameterWithItsCounts) {
  Poisoned run({});
  const optim::StepResult result = run.step_with({{"0.weight", 3, kOverflowInf},
                                                  {"0.weight", 5, kOverflowInf},
                                                  {"0.weight", 7, kNaN},
                                                  {"3.bias", 0, kNaN}});
  EXPECT_EQ(result.culprit, "0.weight");
  EXPECT_EQ(result.reason,
            "inf and NaN in the gradient of 0.weight (3 elements), and 1 more parameter; loss "
            "scale 65536 -> 32768");
  const Overflow overflow = run.precision->overflows().back();
  ASSERT_EQ(overflow.culprits.size(), 2u);
  EXPECT_EQ(overflow.culprits[0].parameter, "0.weight");
  EXPECT_EQ(overflow.culprits[0].inf, 2);
  EXPECT_EQ(overflow.culprits[0].nan, 1);
  EXPECT_EQ(overflow.culprits[1].parameter, "3.bias");
  EXPECT_EQ(overflow.culprits[1].inf, 0);
  EXPECT_EQ(overflow.culprits[1].nan, 1);
  EXPECT_EQ(overflow.step, 1);
  EXPECT_EQ(overflow.loss_scale, 65536.0);
}

TEST(Overflow, ARankIsNamedAndAllSkipTogether) {
  Options options;
  options.world = world_of({[](const std::string& own) { return test::step_report(own, {}); },
                            [](const std::string& own) {
                              return test::step_report(own, {{"3.weight", 0, 4}});
                            }});
  Poisoned run(options);
  const auto before = everything(run.model, run.optimizer);
  const optim::StepResult result = run.step_with({});
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.reason,
            "NaN in the gradient of 3.weight (4 elements) on rank 2; loss scale 65536 -> 32768");
  EXPECT_EQ(run.precision->overflows().back().culprits[0].rank, 2);
  EXPECT_EQ(everything(run.model, run.optimizer), before);
}

TEST(Overflow, EveryRankSaysTheSame) {
  std::vector<std::string> said(2);
  for (int round = 0; round < 2; ++round) {  // first what each says, then what each hears
    for (const int rank : {0, 1}) {
      Options options;
      options.world = {rank, 2, [&, rank](const std::string& value, std::string_view name) {
                         if (name == "amp's options") return std::vector<std::string>{value};
                         said[static_cast<std::size_t>(rank)] = value;
                         std::vector<std::string> all = said;
                         for (std::string& text : all) text = text.empty() ? value : text;
                         return all;
                       }};
      Poisoned run(options);
      const optim::StepResult result =
          rank == 1 ? run.step_with({{"0.bias", 0, kOverflowInf}}) : run.step_with({});
      if (round == 0) continue;
      EXPECT_FALSE(result.applied);
      EXPECT_EQ(result.reason,
                "inf in the gradient of 0.bias (1 element) on rank 1; loss scale 65536 -> 32768");
    }
  }
}

TEST(Overflow, GradientsSummedOverRanksAccuseOnlyWhoseOwnWereNotFinite) {
  for (const bool guilty : {true, false}) {
    Options options;
    const auto link = std::make_shared<test::FakeLink>();
    link->nonfinite = std::vector<core::NonFinite>();
    if (guilty) link->nonfinite->push_back({"3.weight", 2, 0});
    link->all = [](const std::string& value) {  // the other's were finite before the sum
      return std::vector{test::step_report(value, {}, {{"0.weight", 9, 0}}), value};
    };
    options.world = {1, 2, link};
    Poisoned run(options);
    const std::string reason = run.step_with({{"0.weight", 0, kOverflowInf}}).reason;
    EXPECT_THAT(reason, guilty ? HasSubstr("3.weight (2 elements) on rank 1")
                               : HasSubstr("0.weight (9 elements) in the sum over ranks"));
  }
}

TEST(Overflow, NonsenseFromARankIsAnError) {
  Options options;
  options.world = world_of({[](const std::string&) { return "culprit"; }});
  Poisoned run(options);
  EXPECT_THROW(run.step_with({}), core::CommunicationError);
}

TEST(Overflow, TheHistoryKeepsTheLast) {
  Options options;
  options.overflow_history = 3;
  Poisoned run(options);
  for (int step = 0; step < 5; ++step)
    EXPECT_FALSE(run.step_with({{"0.bias", 0, kOverflowInf}}).applied);
  const std::vector<Overflow> last = run.precision->overflows();
  ASSERT_EQ(last.size(), 3u);
  EXPECT_EQ(last[0].step, 3);
  EXPECT_EQ(last[2].loss_scale, 4096.0);
  const std::string table = overflow_report(last);
  EXPECT_THAT(table, HasSubstr("       5     0        4096  inf in the gradient of 0.bias"));
  EXPECT_EQ(overflow_report({}), "no overflows\n");
}

TEST(Collapse, NamesWhatOverflowedEachTime) {
  Options options;
  options.scaler.init_scale = 4;
  options.collapse_after = 3;
  Poisoned run(options);
  EXPECT_FALSE(run.step_with({{"0.weight", 0, kOverflowInf}}).applied);  // 4 -> 2
  EXPECT_FALSE(run.step_with({{"0.weight", 0, kOverflowInf}}).applied);  // 2 -> 1
  EXPECT_FALSE(run.step_with({{"0.bias", 0, kOverflowInf}, {"3.bias", 0, kOverflowInf}}).applied);
  EXPECT_FALSE(run.step_with({{"3.bias", 0, kOverflowInf}, {"0.weight", 0, kOverflowInf}}).applied);
  const auto before = everything(run.model, run.optimizer);
  try {
    EXPECT_FALSE(run.step_with({{"3.bias", 0, kNaN}}).applied);
    FAIL() << "no LossScaleCollapse";
  } catch (const LossScaleCollapse& collapse) {
    EXPECT_THAT(collapse.parameters(), ElementsAre("3.bias"));
    EXPECT_THAT(collapse.what(), HasSubstr("3 overflows in a row"));
    EXPECT_THAT(collapse.what(), HasSubstr("gradients of 3.bias overflowed each time"));
  }
  EXPECT_EQ(everything(run.model, run.optimizer), before);
  EXPECT_TRUE(run.step_with({}).applied);  // the handle still works
}

TEST(Collapse, ACleanStepStartsTheCountAnew) {
  Options options;
  options.loss_scale = 8;
  options.collapse_after = 2;
  Poisoned run(options);
  for (int round = 0; round < 4; ++round) {
    EXPECT_FALSE(run.step_with({{"0.bias", 0, kOverflowInf}}).applied);
    EXPECT_TRUE(run.step_with({}).applied);
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

TEST(Fallback, ALayerThatKeepsOverflowingRunsInF32) {
  for (const OptLevel level : {OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    nn::Sequential model = overflowing_model();
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1e-12});
    Amp precision = initialize(model, optimizer, {.opt_level = level, .fallback_after = 2});
    const Tensor x = Tensor::full({4, 8}, 1.0);
    const Tensor target = Tensor::zeros({4, 4});
    std::vector<bool> applied;
    std::string reason;
    for (int step = 0; step < 6; ++step) {
      precision.backward(autograd::mse_loss(autograd::to(model(x), DType::f32), target));
      const optim::StepResult result = precision.step();
      applied.push_back(result.applied);
      reason += result.reason;
    }
    SCOPED_TRACE(name(level));
    EXPECT_THAT(precision.fp32_layers(), testing::Contains("0"));
    EXPECT_THAT(reason, HasSubstr("runs in f32 from now on"));
    EXPECT_TRUE(applied.back());
    EXPECT_EQ(model.parameters()[0].tensor.dtype(), DType::f32);
    const bool weights_half = level != OptLevel::O1;
    EXPECT_EQ(model.parameters()[4].tensor.dtype(), weights_half ? DType::f16 : DType::f32);

    nn::Sequential other = overflowing_model();
    optim::FusedSGD other_optimizer(other.parameters(), {.lr = 1e-12});
    Amp resumed = initialize(other, other_optimizer, {.opt_level = level, .fallback_after = 2});
    resumed.load_state_dict(snapshot(precision.state_dict()));
    EXPECT_EQ(resumed.fp32_layers(), precision.fp32_layers());
    const double loss = autograd::mse_loss(autograd::to(other(x), DType::f32), target).item();
    EXPECT_TRUE(std::isfinite(loss)) << loss;
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
  for (const OptLevel level : {OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    SCOPED_TRACE(name(level));
    TiedNet model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1e-12});
    Amp precision = initialize(
        model, optimizer, {.opt_level = level, .scaler = {.init_scale = 1}, .fallback_after = 2});
    const Tensor x = Tensor::full({2, 4}, 1.0);
    bool applied = false;
    for (int step = 0; step < 8; ++step) {
      const Tensor y = autograd::to(model(x), DType::f32);
      precision.backward(autograd::mean(autograd::affine(y, 1e-6, 0.0)));
      applied = precision.step().applied;
    }
    EXPECT_TRUE(applied);
    EXPECT_EQ(precision.fp32_layers(), std::vector<std::string>{"layer"});
  }
}

TEST(Fallback, AScaleThatIsTooHighIsNoReason) {
  Poisoned run([] {
    Options options;
    options.fallback_after = 2;
    return options;
  }());
  for (int step = 0; step < 6; ++step)
    EXPECT_FALSE(run.step_with({{"3.weight", 0, kOverflowInf}}).applied);
  EXPECT_TRUE(run.precision->fp32_layers().empty());
}

TEST(State, ReadsApexsStateAndChecksTheNumberOfScalers) {
  Poisoned run({});
  StateDict apex;
  StateDict& scaler = apex.make_dict("loss_scaler0");
  scaler.set("loss_scale", 512.0);
  scaler.set("unskipped", std::int64_t{3});
  run.precision->load_state_dict(apex);
  EXPECT_EQ(run.precision->loss_scale(), 512.0);
  EXPECT_EQ(run.precision->apex_state_dict().dict("loss_scaler0").integer("unskipped"), 3);
  run.precision->load_state_dict(run.precision->scaler().torch_state_dict());
  EXPECT_EQ(run.precision->loss_scale(), 512.0);
  apex.set("loss_scaler1", scaler);
  EXPECT_THROW(run.precision->load_state_dict(apex), core::DataError);
  EXPECT_THROW(run.precision->load_state_dict(StateDict()), core::DataError);
}

}  // namespace
}  // namespace cairn::amp
