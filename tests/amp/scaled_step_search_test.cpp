// Random sequences of what a trainer with arrays of its own does with ScaledStep (losses of random
// size, overflows, accumulation, clipping, rates, saves and loads, frozen parameters, other ranks)
// against training as a textbook has it, in doubles. CAIRN_STATEFUL_SEQUENCES says how many are
// tried.
#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <type_traits>

#include "cairn/amp/scaled_step.h"
#include "cairn/core/half.h"
#include "cairn/core/log.h"
#include "optim/reference.h"
#include "support.h"
#include "support/fake_world.h"
#include "support/search.h"

namespace cairn::amp::scaled_steps {
namespace {

using core::BFloat16, core::Half;
using test::Draw, test::joined, test::norm_of;

/// What a sequence draws once.
struct Setup {
  bool adam = false;
  double momentum = 0;
  LossScalerOptions scale;
  bool remainder = false;
  int ranks = 1;
};

Setup draw_setup(Draw& draw, bool bf16_weights) {
  Setup setup;
  setup.adam = draw.one_in(2);
  setup.momentum = draw.one_in(2) ? 0.9 : 0.0;
  setup.scale.dynamic = !draw.one_in(5);
  setup.scale.init_scale = std::ldexp(1.0, draw.below(18));
  setup.scale.growth_interval = 1 + draw.below(3);
  setup.scale.min_scale = std::ldexp(1.0, draw.below(3));
  setup.scale.max_scale = std::ldexp(1.0, 8 + draw.below(12));
  setup.scale.hysteresis = 1 + draw.below(3);
  setup.scale.consecutive_hysteresis = draw.one_in(2);
  setup.remainder = bf16_weights && draw.one_in(2);
  setup.ranks = draw.one_in(3) ? 3 : 1;
  return setup;
}

constexpr double kRates[] = {0.125, 0.03125};

template <class Weight, class Gradient>
class Sequence {
 public:
  explicit Sequence(std::uint64_t seed)
      : draw_(seed),
        setup_(draw_setup(draw_, std::is_same_v<Weight, BFloat16>)),
        link_(std::make_shared<test::FakeLink>()) {
    link_->reduces = false;
    link_->all = [this](const std::string& own) {
      std::vector<std::string> all(static_cast<std::size_t>(setup_.ranks), own);
      if (setup_.ranks == 1) return all;
      all[1] = test::step_report(own, other_rank_);
      all[2] = test::step_report(own, {});
      return all;
    };
    const int count = 1 + draw_.below(4);
    for (int p = 0; p < count; ++p) {
      Parameter parameter{"p" + std::to_string(p), p == 0 ? 0 : draw_.below(2)};
      for (int i = draw_.below(p == 0 ? 3 : 40); i >= 0; --i) {
        parameter.weight.push_back(static_cast<double>(draw_.below(64) - 32) / 16);
      }
      parameter.weights = std::vector<Weight>(parameter.weight.begin(), parameter.weight.end());
      parameter.gradients.resize(parameter.weight.size());
      parameters_.push_back(std::move(parameter));
    }
    build();
  }

  void run() {
    const int commands = 4 + draw_.below(30);
    for (int i = 0; i < commands; ++i) {
      where_ = "command " + std::to_string(i);
      switch (draw_.below(12)) {
        case 0:
          save_and_load();
          break;
        case 1:
          lrs_[0] = lrs_[1] = kRates[draw_.below(2)];
          optimizer_->set_lr(lrs_[0]);
          break;
        case 2:
          freeze();
          break;
        default:
          step();
      }
      compare();
      if (::testing::Test::HasFailure()) return;
    }
  }

 private:
  /// Of a weight, relative.
  static constexpr double kRounding = std::is_same_v<Weight, float>  ? 0
                                      : std::is_same_v<Weight, Half> ? 0x1.001p-11
                                                                     : 0x1.001p-8;

  static constexpr double kTiny = std::is_same_v<Weight, Half> ? 0x1p-25 : 0;  // half a subnormal

  struct Parameter {
    std::string name;
    int group = 0;
    bool trainable = true;
    Values weight = {}, gradient = {};  // the reference's
    optim::reference::Adam by_adam = {};
    optim::reference::Sgd by_sgd = {};
    std::vector<Weight> weights = {};  // the trainer's arrays, and the optimizer's tensor of them
    std::vector<Gradient> gradients = {};
    Tensor tensor = {};
  };

  void build() {
    std::vector<optim::ParameterGroup> groups;
    for (const int group : {0, 1}) {
      NamedTensors wrapped;
      for (Parameter& p : parameters_) {
        if (p.group != group) continue;
        const auto n = static_cast<std::int64_t>(p.weight.size());
        wrapped.push_back(optim::wrap_parameter(p.name, Tensor::wrap(p.weights, {n}),
                                                Tensor::wrap(p.gradients, {n})));
        p.tensor = wrapped.back().tensor;
      }
      if (!wrapped.empty()) groups.push_back({.parameters = wrapped, .lr = lrs_[group]});
    }
    const optim::SgdOptions sgd{.momentum = setup_.momentum};
    optimizer_ = setup_.adam ? test::maker<optim::FusedAdam>(optim::AdamOptions{})(groups)
                             : test::maker<optim::FusedSGD>(sgd)(groups);
    if (setup_.remainder) {
      optimizer_->set_state_options({DType::f32, optim::MasterStorage::remainder});
    }
    scaled_ =
        std::make_unique<ScaledStep>(*optimizer_, setup_.scale, World(0, setup_.ranks, link_));
    steps_ = 0;
  }
  Parameter& any_parameter() {
    return parameters_[static_cast<std::size_t>(draw_.below(static_cast<int>(parameters_.size())))];
  }

  // All of a training's state into objects that are made anew, over the same arrays.
  void save_and_load() {
    const StateDict scaler = scaled_->state_dict(), optimizer = optimizer_->state_dict();
    std::vector<Values> before;
    for (const Parameter& p : parameters_) before.push_back(exact(p.tensor));
    scaled_.reset();
    optimizer_.reset();
    build();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& p = parameters_[i];
      p.tensor.set_requires_grad(p.trainable);
      const Tensor value = Tensor::from<double>(before[i], p.tensor.shape(), DType::f32, Device{});
      kernels::write_weight(p.tensor, value, /*keep_exact=*/true);
    }
    optimizer_->load_state_dict(optimizer);
    scaled_->load_state_dict(scaler);
  }

  void freeze() {
    Parameter& p = any_parameter();
    if (&p == &parameters_.front()) return;  // one trains
    p.trainable = !p.trainable;
    p.tensor.set_requires_grad(p.trainable);
  }

  // The trainer's backwards: sums of micro-batches' gradients times the scale, in the type of its
  // arrays. Small multiples of an eighth are exact in all of them; where the type ends they
  // overflow by themselves.
  void backward(int micro_batches) {
    for (Parameter& p : parameters_) {
      p.gradient.assign(p.weight.size(), 0.0);
      for (std::size_t i = 0; i < p.weight.size(); ++i) {
        Gradient sum(0.0f);
        for (int m = 0; m < micro_batches; ++m) {
          const double g = static_cast<double>(draw_.below(17) - 8) / 8;
          sum = Gradient(static_cast<float>(sum) + static_cast<float>(g * scaled_->scale()));
          p.gradient[i] += g / micro_batches;
        }
        p.gradients[i] = sum;
      }
    }
    if (!draw_.one_in(6)) return;
    Parameter& p = any_parameter();
    const int elements = 1 + draw_.below(static_cast<int>(p.weight.size()));
    for (int k = 0; k < elements; ++k) {
      p.gradients[static_cast<std::size_t>(k)] =
          Gradient(static_cast<float>(draw_.of<double>({kInf, -kInf, kNaN})));
    }
  }

  /// The parameters of which an update finds something that is not finite, in its order.
  std::vector<std::string> overflowed() const {
    const auto finite = [](const Gradient& g) { return std::isfinite(static_cast<float>(g)); };
    std::vector<std::string> names;
    for (const int group : {0, 1}) {
      for (const Parameter& p : parameters_) {
        const bool all = std::all_of(p.gradients.begin(), p.gradients.end(), finite);
        if (p.group == group && p.trainable && !all) names.push_back(p.name);
      }
    }
    return names;
  }

  void step() {
    const int micro_batches = 1 + draw_.below(4);
    optim::StepOptions options{.gradient_scale = 1.0 / micro_batches};
    options.norm_type = draw_.of<double>({2, 2, 1, 3, kInf});
    if (draw_.one_in(2)) options.max_gradient_norm = draw_.of<double>({0.25, 1, 100});
    options.per_group_norm = draw_.one_in(3);
    backward(micro_batches);
    other_rank_.clear();
    const bool elsewhere = setup_.ranks > 1 && draw_.one_in(5);
    if (elsewhere) other_rank_ = {{"p0", 2, 0}};
    const std::vector<std::string> names = overflowed();
    const bool overflow = elsewhere || !names.empty();
    const double before = scaled_->scale();
    const optim::StepResult result = scaled_->step(options);
    ++steps_;
    EXPECT_EQ(result.applied, !overflow) << where_ << ": " << result.reason;
    scale_.update(overflow);
    if (overflow) {
      expect_told(result, names, before);
    } else {
      update(options, result);
    }
  }
  void expect_told(const optim::StepResult& result, const std::vector<std::string>& names,
                   double scale) {
    EXPECT_EQ(result.culprit, names.empty() ? "p0" : names.front()) << where_;
    ASSERT_TRUE(scaled_->last_overflow());
    EXPECT_EQ(scaled_->last_overflow()->step, steps_) << where_;
    EXPECT_EQ(scaled_->last_overflow()->loss_scale, scale) << where_;
    std::set<std::string> told;
    for (const Culprit& culprit : scaled_->last_overflow()->culprits) {
      if (culprit.rank == 0) told.insert(culprit.parameter);
    }
    EXPECT_EQ(told, std::set<std::string>(names.begin(), names.end())) << where_;
  }
  void update(const optim::StepOptions& options, const optim::StepResult& result) {
    std::vector<Values> all, of_group[2];
    for (const Parameter& p : parameters_) {
      if (!p.trainable) continue;
      all.push_back(p.gradient);
      of_group[p.group].push_back(p.gradient);
    }
    const double norm = norm_of(joined(all), options.norm_type);
    double coefficients[2], least = 1;
    for (const int g : {0, 1}) {
      const double own =
          options.per_group_norm ? norm_of(joined(of_group[g]), options.norm_type) : norm;
      const bool clips = options.max_gradient_norm > 0 && own > options.max_gradient_norm;
      coefficients[g] = clips ? options.max_gradient_norm / (own + 1e-6) : 1.0;
      if (!of_group[g].empty()) least = std::min(least, coefficients[g]);
    }
    EXPECT_NEAR(result.gradient_norm, norm, 1e-5 * (1 + norm)) << where_;
    EXPECT_NEAR(result.clip_coefficient, least, 1e-5) << where_;
    for (Parameter& p : parameters_) {
      if (p.trainable) update(p, lrs_[p.group], coefficients[p.group]);
    }
  }
  void update(Parameter& p, double lr, double coefficient) const {
    if (setup_.adam) {
      p.by_adam.options.lr = lr;
      p.by_adam.update(p.weight, p.gradient, coefficient);
    } else {
      p.by_sgd.options = {.lr = lr, .momentum = setup_.momentum};
      p.by_sgd.update(p.weight, p.gradient, coefficient);
    }
  }
  void compare() {
    EXPECT_EQ(scaled_->scale(), scale_.value) << where_;
    for (const Parameter& p : parameters_) {
      const Values got = exact(p.tensor);
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double raw = static_cast<float>(p.weights[i]);
        const double size = 1 + std::abs(p.weight[i]);
        ASSERT_NEAR(got[i], p.weight[i], 2e-5 * size) << where_ << ", " << p.name;
        ASSERT_NEAR(raw, got[i], kRounding * std::abs(got[i]) + kTiny) << where_;
      }
    }
  }

  Draw draw_;
  Setup setup_;
  std::shared_ptr<test::FakeLink> link_;
  std::vector<core::NonFinite> other_rank_;
  std::vector<Parameter> parameters_;
  ScaleReference scale_{setup_.scale};
  double lrs_[2] = {kRates[0], kRates[1]};
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<ScaledStep> scaled_;
  std::int64_t steps_ = 0;
  std::string where_;
};

template <class Weight, class Gradient>
void search() {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "arrays of the host";
  log::set_level(log::Level::off);
  for (const std::uint64_t seed : test::search_seeds(300)) {
    SCOPED_TRACE(seed);
    Sequence<Weight, Gradient>(seed).run();
    if (::testing::Test::HasFailure()) break;
  }
  log::set_level(log::Level::info);
}

TEST(ScaledStepSearch, F32Arrays) {
  search<float, float>();
}
TEST(ScaledStepSearch, F16Arrays) {
  search<Half, Half>();
}
TEST(ScaledStepSearch, BF16Arrays) {
  search<BFloat16, BFloat16>();
}
TEST(ScaledStepSearch, F16WeightsWithF32Gradients) {
  search<Half, float>();
}
TEST(ScaledStepSearch, BF16WeightsWithF32Gradients) {
  search<BFloat16, float>();
}

}  // namespace
}  // namespace cairn::amp::scaled_steps
