// Random sequences of what a trainer with arrays of its own does with ScaledStep (losses of random
// size, overflows, accumulation, clipping, rates, saves and loads, frozen parameters, other ranks)
// against training as a textbook has it, in doubles. CAIRN_STATEFUL_SEQUENCES says how many are
// tried.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "cairn/amp/scaled_step.h"
#include "cairn/core/half.h"
#include "cairn/core/log.h"
#include "cairn/optim/optim.h"
#include "optim/reference.h"
#include "support/fake_world.h"
#include "support/search.h"
#include "support/training.h"

namespace cairn::amp::scaled_steps {
namespace {

using core::BFloat16;
using core::Half;
using test::Draw;
using test::exact, test::joined, test::kInf, test::kNaN, test::norm_of, test::Values;

// ---- The reference

/// Halves and doubles as LossScalerOptions says, of which it has the numbers.
struct Scale {
  LossScalerOptions options;
  double value = 0;
  int clean = 0, overflows = 0;  // that count towards hysteresis

  void update(bool overflow) {
    if (!options.dynamic) return;
    if (overflow) {
      clean = 0;
      if (++overflows >= options.hysteresis) {
        value = std::max(options.min_scale, value * options.backoff_factor);
      }
      return;
    }
    if (options.consecutive_hysteresis) overflows = 0;
    if (++clean < options.growth_interval) return;
    value = std::min(options.max_scale, value * options.growth_factor);
    clean = overflows = 0;
  }
};

struct Parameter {
  std::string name;
  int group = 0;
  bool trainable = true;
  Values weight = {}, gradient = {};
  optim::reference::Adam by_adam = {};
  optim::reference::Sgd by_sgd = {};
};

// ---- The system

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
    scale_.options = setup_.scale;
    scale_.value = setup_.scale.init_scale;
    if (setup_.scale.dynamic) {
      scale_.value = std::clamp(scale_.value, setup_.scale.min_scale, setup_.scale.max_scale);
    }
    const int count = 1 + draw_.below(4);
    for (int p = 0; p < count; ++p) {
      Parameter parameter{"p" + std::to_string(p), p == 0 ? 0 : draw_.below(2)};
      for (int i = draw_.below(p == 0 ? 3 : 40); i >= 0; --i) {
        parameter.weight.push_back(static_cast<double>(draw_.below(64) - 32) / 16);
      }
      reference_.push_back(parameter);
      weights_.emplace_back(parameter.weight.begin(), parameter.weight.end());
      gradients_.emplace_back(parameter.weight.size());
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

  NamedTensors wrapped(int group) {
    NamedTensors parameters;
    for (std::size_t p = 0; p < reference_.size(); ++p) {
      if (reference_[p].group != group) continue;
      const auto n = static_cast<std::int64_t>(reference_[p].weight.size());
      parameters.push_back(optim::wrap_parameter(reference_[p].name, Tensor::wrap(weights_[p], {n}),
                                                 Tensor::wrap(gradients_[p], {n})));
      tensors_.push_back(parameters.back());
    }
    return parameters;
  }
  void build() {
    tensors_.clear();
    std::vector<optim::ParameterGroup> groups;
    for (const int group : {0, 1}) {
      NamedTensors parameters = wrapped(group);
      if (!parameters.empty()) groups.push_back({.parameters = parameters, .lr = lrs_[group]});
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
  Tensor tensor(const std::string& name) const {
    const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                    [&](const NamedTensor& t) { return t.name == name; });
    return found->tensor;
  }

  std::size_t any_parameter() {
    return static_cast<std::size_t>(draw_.below(static_cast<int>(reference_.size())));
  }

  // All of a training's state into objects that are made anew, over the same arrays.
  void save_and_load() {
    const StateDict scaler = scaled_->state_dict(), optimizer = optimizer_->state_dict();
    std::vector<Values> before;
    for (const Parameter& p : reference_) before.push_back(exact(tensor(p.name)));
    scaled_.reset();
    optimizer_.reset();
    build();
    for (std::size_t p = 0; p < reference_.size(); ++p) {
      Tensor weight = tensor(reference_[p].name);
      weight.set_requires_grad(reference_[p].trainable);
      const Tensor value = Tensor::from<double>(before[p], weight.shape(), DType::f32, Device{});
      kernels::write_weight(weight, value, /*keep_exact=*/true);
    }
    optimizer_->load_state_dict(optimizer);
    scaled_->load_state_dict(scaler);
  }

  void freeze() {
    const std::size_t p = any_parameter();
    if (p == 0) return;  // one trains
    reference_[p].trainable = !reference_[p].trainable;
    tensor(reference_[p].name).set_requires_grad(reference_[p].trainable);
  }

  // The trainer's backwards: sums of micro-batches' gradients times the scale, in the type of its
  // arrays. Small multiples of an eighth are exact in all of them; where the type ends they
  // overflow by themselves.
  void backward(int micro_batches) {
    for (std::size_t p = 0; p < reference_.size(); ++p) {
      Parameter& parameter = reference_[p];
      parameter.gradient.assign(parameter.weight.size(), 0.0);
      for (std::size_t i = 0; i < parameter.weight.size(); ++i) {
        Gradient sum(0.0f);
        for (int m = 0; m < micro_batches; ++m) {
          const double g = static_cast<double>(draw_.below(17) - 8) / 8;
          sum = Gradient(static_cast<float>(sum) + static_cast<float>(g * scaled_->scale()));
          parameter.gradient[i] += g / micro_batches;
        }
        gradients_[p][i] = sum;
      }
    }
    if (!draw_.one_in(6)) return;
    const std::size_t p = any_parameter();
    const int elements = 1 + draw_.below(static_cast<int>(reference_[p].weight.size()));
    for (int k = 0; k < elements; ++k) {
      gradients_[p][static_cast<std::size_t>(k)] =
          Gradient(static_cast<float>(draw_.of<double>({kInf, -kInf, kNaN})));
    }
  }

  /// The parameters of which an update finds something that is not finite.
  std::vector<std::string> overflowed() const {
    std::vector<std::string> names;
    for (const NamedTensor& t : tensors_) {
      const std::size_t p = static_cast<std::size_t>(std::stoi(t.name.substr(1)));
      const auto& values = gradients_[p];
      const bool finite = std::all_of(values.begin(), values.end(), [](const Gradient& g) {
        return std::isfinite(static_cast<float>(g));
      });
      if (reference_[p].trainable && !finite) names.push_back(t.name);
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
    for (const Parameter& p : reference_) {
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
    for (Parameter& p : reference_) {
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
    for (std::size_t p = 0; p < reference_.size(); ++p) {
      const Parameter& expected = reference_[p];
      const Values got = exact(tensor(expected.name));
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double raw = static_cast<float>(weights_[p][i]);
        const double size = 1 + std::abs(expected.weight[i]);
        ASSERT_NEAR(got[i], expected.weight[i], 2e-5 * size) << where_ << ", " << expected.name;
        ASSERT_NEAR(raw, got[i], kRounding * std::abs(got[i]) + kTiny) << where_;
      }
    }
  }

  Draw draw_;
  Setup setup_;
  std::shared_ptr<test::FakeLink> link_;
  std::vector<core::NonFinite> other_rank_;
  std::vector<Parameter> reference_;
  Scale scale_;
  double lrs_[2] = {kRates[0], kRates[1]};
  std::vector<std::vector<Weight>> weights_;  // the trainer's arrays, by parameter
  std::vector<std::vector<Gradient>> gradients_;
  NamedTensors tensors_;  // in the order of the optimizer's
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
