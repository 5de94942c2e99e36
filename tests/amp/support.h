// What the amp tests share: a small classifier, its data, comparison of whole trainings; and
// models of one weight, whose steps are told by a glance.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "support/training.h"

namespace cairn::amp {

using test::exact, test::expect_applied, test::kInf, test::kNaN, test::message_of, test::snapshot,
    test::Values, test::values;

/// Linear 8 -> 16, batch norm, ReLU, Linear 16 -> 4; the same values for the same seed.
inline nn::Sequential make_model(std::uint64_t seed = 1) {
  manual_seed(seed);
  return nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Linear(16, 4));
}

struct Batch {
  Tensor x;       // [32, 8] f32
  Tensor labels;  // [32] i64
};

/// Labels that follow from x, so that the loss can fall.
inline Batch make_batch(std::uint64_t seed) {
  const Values x = test::random_values(32 * 8, 1000 + seed, -2.0, 2.0);
  std::vector<std::int64_t> labels(32);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const double* row = &x[8 * i];
    labels[i] = (row[0] + row[1] > row[2] ? 1 : 0) + (row[3] > row[4] * row[5] ? 2 : 0);
  }
  return {Tensor::from(x, {32, 8}, DType::f32), Tensor::from(labels, {32})};
}

inline Tensor loss_of(nn::Module& model, const Batch& batch) {
  return autograd::cross_entropy(model(batch.x), batch.labels);
}

inline optim::StepResult train_step(nn::Module& model, Amp& precision, const Batch& batch) {
  precision.backward(loss_of(model, batch));
  return precision.step();
}

/// Everything that training changes: parameters, masters, moments, buffers.
inline std::vector<Values> everything(nn::Module& model, const optim::Optimizer& optimizer) {
  std::vector<Values> all = test::everything(model.parameters(), optimizer);
  for (const Values& buffer : values(model.buffers())) all.push_back(buffer);
  return all;
}

/// A classifier that amp trains.
template <class Optimizer = optim::FusedAdam, class OptimizerOptions = optim::AdamOptions>
struct Classifier {
  explicit Classifier(const Options& options, const OptimizerOptions& its = {},
                      nn::Sequential other = make_model(), const optim::StateOptions& state = {})
      : model(std::move(other)), optimizer(model.parameters(), its), precision([&] {
          optimizer.set_state_options(state);
          return initialize(model, optimizer, options);
        }()) {}
  optim::StepResult train(const Batch& batch) { return train_step(model, precision, batch); }
  /// Steps of batches [from, to), which must be applied.
  void train(std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t seed = from; seed < to; ++seed)
      test::expect_applied(train(make_batch(seed)));
  }
  std::vector<Values> everything() { return amp::everything(model, optimizer); }
  Tensor parameter(std::size_t i) const { return model.parameters()[i].tensor; }

  nn::Sequential model;
  Optimizer optimizer;
  Amp precision;
};
using SgdClassifier = Classifier<optim::FusedSGD, optim::SgdOptions>;

/// w [4] of ones, whose gradient is the coefficient of its loss: sum(coefficient * w).
class Weight : public nn::Module {
 public:
  Weight() : w_(add_parameter("w", Tensor::full({4}, 1.0))) {}
  std::string kind() const override { return "Weight"; }
  Tensor forward(const Tensor& x) override { return autograd::sum(autograd::mul(w_, x)); }
  Tensor loss(double coefficient) { return (*this)(Tensor::full({4}, coefficient)); }
  const Tensor& w() const { return w_; }
  double value() const {
    const Values all = exact(w_);
    EXPECT_EQ(all, Values(4, all.front()));
    return all.front();
  }

 private:
  Tensor w_;
};

inline Options at(OptLevel level, Options options = {}) {
  options.opt_level = level;
  return options;
}

/// The gradient of a half sum is the scale itself: 65536 would be inf in f16.
inline const Options kO2{.opt_level = OptLevel::O2, .scaler = {.init_scale = 1024}};

inline Options with_losses(int count, Options options = kO2) {
  options.num_losses = count;
  return options;
}

/// Loss 0 at 1024, loss 1 at 16.
inline void set_two_scales(Amp& precision) {
  StateDict scalers = precision.apex_state_dict();
  scalers.make_dict("loss_scaler1").set("loss_scale", 16.0);
  precision.load_state_dict(scalers);
}

/// A weight that amp trains, at the rate 1.
struct One {
  explicit One(const Options& options = kO2) : precision(initialize(model, optimizer, options)) {}
  void backward(double coefficient, const LossOptions& options = {}) {
    precision.backward(model.loss(coefficient), options);
  }
  optim::StepResult train(double coefficient, const LossOptions& options = {}) {
    backward(coefficient, options);
    return precision.step();
  }
  Weight model;
  optim::FusedSGD optimizer{model.parameters(), {.lr = 1.0}};
  Amp precision;
};

/// One with two losses, at 1024 and at 16.
struct TwoScales : One {
  TwoScales() : One(with_losses(2)) { set_two_scales(precision); }
};

/// Two weights with an optimizer each.
struct Pair {
  explicit Pair(const Options& options = with_losses(2))
      : precision(initialize({&a, &b}, {&a_optimizer, &b_optimizer}, options)) {}
  Tensor loss(double a_coefficient, double b_coefficient) {
    return autograd::add(a.loss(a_coefficient), b.loss(b_coefficient));
  }
  /// Loss 0, of both.
  void backward(double a_coefficient, double b_coefficient) {
    precision.backward(loss(a_coefficient, b_coefficient));
  }
  void backward_a(double coefficient, int loss_id = 0) {
    precision.backward(a.loss(coefficient), {.loss_id = loss_id, .optimizers = {&a_optimizer}});
  }
  void backward_b(double coefficient, int loss_id = 1) {
    precision.backward(b.loss(coefficient), {.loss_id = loss_id, .optimizers = {&b_optimizer}});
  }
  optim::StepResult step_a() { return precision.step(a_optimizer); }
  optim::StepResult step_b() { return precision.step(b_optimizer); }

  Weight a, b;
  optim::FusedSGD a_optimizer{a.parameters(), {.lr = 1.0}};
  optim::FusedSGD b_optimizer{b.parameters(), {.lr = 1.0}};
  Amp precision;
};

/// Halves and doubles as LossScalerOptions says, of which it has the numbers.
struct ScaleReference {
  explicit ScaleReference(const LossScalerOptions& options) : options(options) {
    value = options.init_scale;
    if (options.dynamic) value = std::clamp(value, options.min_scale, options.max_scale);
  }
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

  LossScalerOptions options;
  double value = 0;
  int clean = 0, overflows = 0;  // that count towards hysteresis
};

inline const OptLevel kLevels[] = {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3};
inline const DType kHalves[] = {DType::f16, DType::bf16};

}  // namespace cairn::amp
