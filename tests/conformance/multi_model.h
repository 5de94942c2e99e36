// Apex's test_multiple_models_optimizers_losses as a machine: scenarios of models, losses and
// optimizers, trained at every opt level with an inf put into one gradient, against a reference
// that needs no amp.
//
// A model is two parameters, w0 (f32) and w1 (half), and the loss sum(x w0 w1) with x of ones, so
// the gradients are known by hand: x w1 and x w0.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/optim/arena.h"
#include "cairn/optim/optimizer_access.h"
#include "cairn/optim/sgd.h"
#include "support/tensors.h"

namespace cairn::conformance {

class MyModel : public nn::Module {
 public:
  explicit MyModel(double unique)
      : w0_(add_parameter("weight0", Tensor::from<double>({unique, unique + 1}, {2}, DType::f32))),
        w1_(add_parameter("weight1",
                          Tensor::from<double>({1 + unique, 2 + unique}, {2}, DType::f32))) {}
  std::string kind() const override { return "MyModel"; }
  Tensor forward(const Tensor& x) override {
    return autograd::sum(autograd::mul(autograd::mul(x, autograd::to(w0_, DType::f32)),
                                       autograd::to(w1_, DType::f32)));
  }
  Tensor& w0() { return w0_; }
  Tensor& w1() { return w1_; }
  void halve() { w1_.set_data(Tensor::from(w1_.to_vector<double>(), {2}, DType::f16)); }

 private:
  Tensor w0_, w1_;
};

struct Group {
  std::size_t model;
  double lr;
};
struct OptimizerSpec {
  std::vector<Group> groups;
  double momentum;
};
struct LossSpec {
  std::vector<std::size_t> models;      // the loss is the sum of theirs
  std::vector<std::size_t> optimizers;  // that it is given
};
struct Scenario {
  const char* name;
  std::size_t models;
  std::vector<OptimizerSpec> optimizers;
  std::vector<LossSpec> losses;
  int cases;
};
inline void PrintTo(const Scenario& scenario, std::ostream* out) {
  *out << scenario.name;
}

inline std::vector<Scenario> scenarios() {
  return {
      {"TwoModelsTwoLossesOneOptimizer",
       2,
       {{{{0, .25}, {1, .5}}, .125}},
       {{{0}, {0}}, {{1}, {0}}},
       120},
      {"ThreeModelsTwoLossesOneOptimizer",
       3,
       {{{{0, .25}, {1, .5}, {2, .125}}, .125}},
       {{{0, 2}, {0}}, {{1, 2}, {0}}},
       216},
      {"TwoModelsTwoLossesTwoOptimizers",
       2,
       {{{{0, .25}}, .125}, {{{1, .5}}, .25}},
       {{{0}, {0}}, {{1}, {1}}},
       120},
      {"ThreeModelsTwoLossesTwoOptimizers",
       3,
       {{{{0, .25}, {1, 1.0}}, .5}, {{{2, .5}}, .25}},
       {{{0, 1}, {0}}, {{1, 2}, {0, 1}}},
       216},
  };
}

/// Where an inf is put.
struct Injection {
  int iteration = -1;  // none
  std::size_t backward = 0, model = 0;
  bool into_half = false;
};

struct Case {
  amp::OptLevel level;
  int zeroing;  // 0: each gradient dropped, 1: model.clear_grad(), 2: optimizer.clear_grad()
  int scalers;  // 1 (scale 4) or 2 (4 and 16)
  Injection inject;
};

inline std::vector<Case> cases_of(const Scenario& scenario) {
  std::vector<Case> all;
  for (const auto level :
       {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
    for (int zeroing = 0; zeroing < 3; ++zeroing) {
      for (const int scalers : {1, 2}) {
        all.push_back({level, zeroing, scalers, {}});
        if (level != amp::OptLevel::O1 && level != amp::OptLevel::O2) continue;
        for (const int iteration : {0, 1}) {
          for (std::size_t backward = 0; backward < scenario.losses.size(); ++backward) {
            for (const std::size_t model : scenario.losses[backward].models) {
              for (const bool half : {true, false}) {
                all.push_back({level, zeroing, scalers, {iteration, backward, model, half}});
              }
            }
          }
        }
      }
    }
  }
  return all;
}

using Vec = std::array<double, 2>;

/// SGD with momentum in double precision on hand-made gradients.
class Reference {
 public:
  explicit Reference(const Scenario& scenario) : scenario_(scenario) {
    for (std::size_t m = 0; m < scenario.models; ++m) {
      const double u = static_cast<double>(m + 1);
      weights_.push_back({Vec{u, u + 1}, Vec{1 + u, 2 + u}});
      buffers_.push_back({});
    }
  }
  /// Steps the optimizers that are not skipped.
  void step(const std::vector<bool>& skips) {
    std::vector<std::array<Vec, 2>> gradients(scenario_.models, {Vec{}, Vec{}});
    for (const LossSpec& loss : scenario_.losses) {
      for (const std::size_t m : loss.models) {
        for (std::size_t k = 0; k < 2; ++k) {
          gradients[m][0][k] += weights_[m][1][k];
          gradients[m][1][k] += weights_[m][0][k];
        }
      }
    }
    steps_.resize(scenario_.optimizers.size());
    for (std::size_t o = 0; o < scenario_.optimizers.size(); ++o) {
      if (skips[o]) continue;
      const OptimizerSpec& spec = scenario_.optimizers[o];
      for (const Group& group : spec.groups) {
        for (std::size_t p = 0; p < 2; ++p) {
          for (std::size_t k = 0; k < 2; ++k) {
            double& buffer = buffers_[group.model][p][k];
            buffer = steps_[o] == 0 ? gradients[group.model][p][k]
                                    : spec.momentum * buffer + gradients[group.model][p][k];
            weights_[group.model][p][k] -= group.lr * buffer;
          }
        }
      }
      ++steps_[o];
    }
  }
  const Vec& weight(std::size_t model, std::size_t parameter) const {
    return weights_[model][parameter];
  }
  const Vec& buffer(std::size_t model, std::size_t parameter) const {
    return buffers_[model][parameter];
  }

 private:
  const Scenario& scenario_;
  std::vector<std::array<Vec, 2>> weights_, buffers_;
  std::vector<int> steps_;
};

/// torch.testing.assert_close's tolerance for the dtype.
inline void expect_close(const std::vector<double>& values, const Vec& expected, DType dtype) {
  const double relative = dtype == DType::f16 ? 1e-3 : 1.3e-6;
  test::expect_close(values, {expected.begin(), expected.end()}, relative, 1e-5);
}

class CaseRun {
 public:
  CaseRun(const Scenario& scenario, const Case& c, bool f32_slots)
      : scenario_(scenario), case_(c), reference_(scenario) {
    for (std::size_t m = 0; m < scenario.models; ++m) {
      models_.push_back(std::make_unique<MyModel>(static_cast<double>(m + 1)));
    }
    for (const OptimizerSpec& spec : scenario.optimizers) make_optimizer(spec, f32_slots);
    std::vector<nn::Module*> models;
    std::vector<optim::Optimizer*> optimizers;
    for (const auto& model : models_) models.push_back(model.get());
    for (const auto& optimizer : optimizers_) optimizers.push_back(optimizer.get());
    // As Apex's test: models are not cast; one of the parameters is half all the same.
    amp::Options options{.opt_level = c.level, .num_losses = c.scalers};
    if (c.level != amp::OptLevel::O1) options.cast_model_type = DType::f32;
    options.dynamic_loss_scale = c.level == amp::OptLevel::O1 || c.level == amp::OptLevel::O2;
    if (!options.dynamic_loss_scale) options.loss_scale = 4.0;
    options.scaler.init_scale = 4.0;
    precision_ = std::make_unique<amp::Amp>(amp::initialize(models, optimizers, options));
    if (c.scalers == 2 && options.dynamic_loss_scale) {
      StateDict scalers = precision_->apex_state_dict();
      scalers.make_dict("loss_scaler1").set("loss_scale", 16.0);
      scalers.make_dict("loss_scaler1").set("unskipped", std::int64_t{0});
      precision_->load_state_dict(scalers);
    }
    for (const auto& model : models_) model->halve();
    for (const auto& optimizer : optimizers_) {
      optimizer->set_master_weights(c.level == amp::OptLevel::O2);
      optim::OptimizerAccess(*optimizer).refresh();
    }
  }

  void train() {
    const int iterations = case_.inject.iteration >= 0 ? 3 : 2;
    for (int i = 0; i < iterations; ++i) {
      zero_gradients();
      const std::int64_t reads = kernels::host_reads();
      for (std::size_t b = 0; b < scenario_.losses.size(); ++b) backward(i, b);
      step(i == case_.inject.iteration, reads);
    }
    check_scales();
  }

 private:
  void make_optimizer(const OptimizerSpec& spec, bool f32_slots) {
    std::vector<optim::ParameterGroup> groups;
    NamedTensors all;
    for (const Group& group : spec.groups) {
      NamedTensors parameters;
      for (const auto& [name, tensor] : models_[group.model]->parameters()) {
        parameters.push_back({std::to_string(group.model) + "_" + name, tensor});
        all.push_back(parameters.back());
      }
      groups.push_back({parameters, group.lr, 0.0});
    }
    if (f32_slots) arenas_.push_back(optim::GradientArena::attach(all, true));
    optimizers_.push_back(std::make_unique<optim::FusedSGD>(
        std::move(groups), optim::SgdOptions{.momentum = spec.momentum}));
  }

  void zero_gradients() {
    for (const auto& model : models_) {
      if (case_.zeroing == 0) {
        model->w0().clear_grad();
        model->w1().clear_grad();
      }
      if (case_.zeroing == 1) model->clear_grad();
    }
    for (const auto& optimizer : optimizers_) {
      if (case_.zeroing == 2) optimizer->clear_grad();
    }
  }

  void backward(int iteration, std::size_t b) {
    const Tensor x = Tensor::full({2}, 1.0);
    const LossSpec& spec = scenario_.losses[b];
    Tensor loss;
    for (const std::size_t m : spec.models) {
      const Tensor part = (*models_[m])(x);
      loss = loss.defined() ? autograd::add(loss, part) : part;
    }
    amp::LossOptions options{.loss_id = case_.scalers == 2 ? static_cast<int>(b) : 0};
    for (const std::size_t o : spec.optimizers) options.optimizers.push_back(optimizers_[o].get());
    precision_->backward(loss, options);
    if (iteration != case_.inject.iteration || b != case_.inject.backward) return;
    MyModel& model = *models_[case_.inject.model];
    const Tensor gradient =
        (case_.inject.into_half ? model.w1() : model.w0()).gradient_slot().memory();
    const double inf = std::numeric_limits<double>::infinity();
    std::vector<double> poisoned = gradient.to_vector<double>();
    poisoned[0] = inf;
    kernels::copy(Tensor::from(poisoned, {2}, gradient.dtype()), gradient);
  }

  void step(bool injected, std::int64_t reads) {
    std::vector<bool> skips(optimizers_.size(), false);
    if (injected) {
      for (const std::size_t o : scenario_.losses[case_.inject.backward].optimizers) {
        skips[o] = true;
      }
    }
    const optim::StepResult result = precision_->step();
    EXPECT_EQ(result.applied, !injected);
    EXPECT_EQ(kernels::host_reads(), reads + 1) << "one host read a step";
    reference_.step(skips);
    for (std::size_t o = 0; o < optimizers_.size(); ++o) check_optimizer(o);
  }

  void check_optimizer(std::size_t o) {
    const StateDict& state = optimizers_[o]->state_dict();
    for (const Group& group : scenario_.optimizers[o].groups) {
      MyModel& model = *models_[group.model];
      for (std::size_t p = 0; p < 2; ++p) {
        const Tensor& tensor = p == 0 ? model.w0() : model.w1();
        const bool master = case_.level == amp::OptLevel::O2 && p == 1;
        SCOPED_TRACE(core::str("model ", group.model, " weight", p));
        // Made before the first backward that reaches the optimizer, at the latest by its first
        // step.
        if (!master || optimizers_[o]->steps() > 0) {
          EXPECT_EQ(kernels::MasterWeight::exists(tensor), master);
        }
        expect_close(tensor.to_vector<double>(), reference_.weight(group.model, p),
                     p == 1 || case_.level != amp::OptLevel::O0 ? DType::f16 : DType::f32);
        const StateDict& entry = state.dict("state").dict(core::str(group.model, "_weight", p));
        if (entry.integer("step") == 0) continue;
        expect_close(entry.tensor("momentum_buffer").to_vector<double>(),
                     reference_.buffer(group.model, p), DType::f16);
        if (!kernels::MasterWeight::exists(tensor)) continue;
        EXPECT_EQ(tensor.to_vector<double>(),
                  Tensor::from(kernels::MasterWeight::of(tensor)->tensor().to_vector<double>(), {2},
                               DType::f16)
                      .to_vector<double>());
      }
    }
  }

  void check_scales() {
    for (int id = 0; id < case_.scalers; ++id) {
      const bool dynamic = precision_->options().dynamic_loss_scale;
      const double initial = id == 1 && dynamic ? 16.0 : 4.0;
      const bool fell = case_.inject.iteration >= 0 &&
                        (case_.scalers == 1 || id == static_cast<int>(case_.inject.backward));
      EXPECT_EQ(precision_->loss_scale(id), fell ? initial / 2 : initial) << "loss " << id;
    }
  }

  const Scenario& scenario_;
  Case case_;
  Reference reference_;
  std::vector<std::unique_ptr<MyModel>> models_;
  std::vector<std::shared_ptr<optim::GradientArena>> arenas_;
  std::vector<std::unique_ptr<optim::FusedSGD>> optimizers_;
  std::unique_ptr<amp::Amp> precision_;
};

inline std::string describe(const Case& c) {
  std::string text =
      core::str(amp::name(c.level), ", zeroing ", c.zeroing, ", scalers ", c.scalers);
  if (c.inject.iteration < 0) return text;
  return text + core::str(", inf in iteration ", c.inject.iteration, ", backward ",
                          c.inject.backward, ", model ", c.inject.model,
                          c.inject.into_half ? ", f16" : ", f32");
}

}  // namespace cairn::conformance
