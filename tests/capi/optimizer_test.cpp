// Optimizers and scaled steps: the bits of the C++ ones, and what is refused.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "cairn/amp/scaled_step.h"
#include "cairn/optim/optim.h"
#include "calls.h"

namespace cairn::test {
namespace {

using core::BFloat16;
using core::Half;
using Make = std::function<std::unique_ptr<optim::Optimizer>(NamedTensors)>;

template <class Rule, class Options>
Make maker(const Options& options) {
  return [options](NamedTensors parameters) {
    return std::make_unique<Rule>(std::move(parameters), options);
  };
}

struct Rule {
  const char* kind;
  const char* options;  // none of them as by default
  Make make;
};
const std::vector<Rule>& rules() {
  using namespace optim;
  static const std::vector<Rule> all = {
      {"adam", "lr=0.02 beta1=0.8 beta2=0.9 eps=1e-4 weight_decay=0.1 bias_correction=0",
       maker<FusedAdam>(AdamOptions{0.02, 0.8, 0.9, 1e-4, 0.1, false, false})},
      {"adamw", "lr=0.02 weight_decay=0.1",
       maker<FusedAdam>(AdamOptions{.lr = 0.02, .weight_decay = 0.1})},
      {"sgd", "lr=0.02 momentum=0.7 weight_decay=0.1 nesterov=1",
       maker<FusedSGD>(SgdOptions{0.02, 0.7, 0.0, 0.1, true, false})},
      {"sgd", "momentum=0.7 dampening=0.2 weight_decay=0.1 wd_after_momentum=1",
       maker<FusedSGD>(SgdOptions{1e-3, 0.7, 0.2, 0.1, false, true})},
      {"adagrad",
       "lr=0.02 eps=1e-4 weight_decay=0.1 adagrad_w=1 lr_decay=0.1 initial_accumulator=0.5",
       maker<FusedAdagrad>(AdagradOptions{0.02, 1e-4, 0.1, true, 0.1, 0.5})},
      {"rmsprop", "lr=0.02 alpha=0.8 eps=1e-4 momentum=0.7 weight_decay=0.1",
       maker<FusedRMSprop>(RmsPropOptions{0.02, 0.8, 1e-4, 0.7, 0.1})},
      {"lamb",
       "lr=0.02 beta1=0.8 beta2=0.9 eps=1e-4 weight_decay=0 bias_correction=0 adamw=0 "
       "grad_averaging=0 max_gradient_norm=0.5 use_nvlamb=1",
       maker<FusedLAMB>(LambOptions{0.02, 0.8, 0.9, 1e-4, 0.0, false, false, false, 0.5, true})},
      {"novograd",
       "lr=0.02 beta1=0.8 beta2=0.9 eps=1e-4 weight_decay=0.1 bias_correction=0 "
       "reg_inside_moment=1 grad_averaging=0 norm_type=inf init_zero=1",
       maker<FusedNovoGrad>(NovoGradOptions{0.02, 0.8, 0.9, 1e-4, 0.1, false, true, false,
                                            std::numeric_limits<double>::infinity(), true})}};
  return all;
}

/// Two parameters, and an optimizer of them.
template <class T>
struct Model {
  Array<T> w{"w", {3, 5}, values_of<T>(15, 1)}, b{"b", {7}, values_of<T>(7, 2)};
  Array<T> dw{"dw", {3, 5}, std::vector<T>(15)}, db{"db", {7}, std::vector<T>(7)};

  void write_gradients(int step, float scale = 1.0f) {
    dw.fill(10 + step, scale);
    db.fill(20 + step, scale);
  }
  NamedTensors parameters() {
    return {
        optim::wrap_parameter("w", Tensor::wrap(w.values, {3, 5}), Tensor::wrap(dw.values, {3, 5})),
        optim::wrap_parameter("b", Tensor::wrap(b.values, {7}), Tensor::wrap(db.values, {7}))};
  }
  cairn_optimizer* optimizer(const char* kind, const char* options) {
    const cairn_tensor weights[] = {w.tensor(), b.tensor()};
    const cairn_tensor gradients[] = {dw.tensor(), db.tensor()};
    cairn_optimizer* made = nullptr;
    expect_ok(cairn_optimizer_create(kind, options, weights, gradients, 2, &made));
    return made;
  }
};

template <class T>
void expect_same(const Model<T>& a, const Model<T>& b, const std::string& what) {
  EXPECT_EQ(std::memcmp(a.w.values.data(), b.w.values.data(), 15 * sizeof(T)), 0) << what;
  EXPECT_EQ(std::memcmp(a.b.values.data(), b.b.values.data(), 7 * sizeof(T)), 0) << what;
}

template <class T>
void expect_the_bits(const Rule& rule) {
  Model<T> ours, theirs;
  cairn_optimizer* const optimizer = ours.optimizer(rule.kind, rule.options);
  const auto reference = rule.make(theirs.parameters());
  for (int step = 0; step < 5; ++step) {
    ours.write_gradients(step);
    theirs.dw.values = ours.dw.values, theirs.db.values = ours.db.values;
    for (const optim::ParameterGroup& group : reference->groups()) {
      for (const NamedTensor& p : group.parameters) p.tensor.gradient_slot().mark_written();
    }
    cairn_step_result result;
    expect_ok(cairn_optimizer_step(
        optimizer, "gradient_scale=0.5 max_gradient_norm=0.9 norm_type=3", &result));
    const optim::StepResult expected =
        reference->step({.gradient_scale = 0.5, .max_gradient_norm = 0.9, .norm_type = 3});
    EXPECT_EQ(result.applied, 1);
    EXPECT_EQ(result.gradient_norm, expected.gradient_norm);
    EXPECT_EQ(result.clip_coefficient, expected.clip_coefficient);
    expect_same(ours, theirs, std::string(rule.kind) + " " + rule.options);
  }
  int64_t steps = 0;
  expect_ok(cairn_optimizer_steps(optimizer, &steps));
  EXPECT_EQ(steps, 5);
  expect_ok(cairn_free(optimizer));
}

TEST(CapiOptimizer, BitsAreThoseOfCxx) {
  for (const Rule& rule : rules()) {
    expect_the_bits<float>(rule);
    expect_the_bits<Half>(rule);
    expect_the_bits<BFloat16>(rule);
  }
}

TEST(CapiOptimizer, StatesAreKeptAsAsked) {
  for (const bool rounded : {false, true}) {
    Model<BFloat16> ours, theirs;
    cairn_optimizer* const optimizer = ours.optimizer("adamw", "lr=0.02");
    optim::FusedAdam reference(theirs.parameters(), {.lr = 0.02});
    expect_ok(cairn_optimizer_keep_state(
        optimizer, rounded ? "masters=none" : "moments=bf16 masters=remainder", nullptr));
    if (rounded) {
      reference.set_master_weights(false);
    } else {
      reference.set_state_options(
          {.moments = DType::bf16, .masters = optim::MasterStorage::remainder});
    }
    cairn_step_result result;
    for (int step = 0; step < 6; ++step) {
      ours.write_gradients(step), theirs.write_gradients(step);
      expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
      (void)reference.step({.keep_gradients = true});
      expect_same(ours, theirs, rounded ? "no masters" : "remainders");
    }
    expect_failed(cairn_optimizer_keep_state(optimizer, "masters=f64", nullptr),
                  CAIRN_INVALID_ARGUMENT, {"f64"});
    expect_failed(cairn_optimizer_keep_state(optimizer, nullptr, "/no/such/folder"), CAIRN_IO_ERROR,
                  {"/no/such/folder"});
    expect_ok(cairn_free(optimizer));
  }
}

TEST(CapiOptimizer, GroupsHaveOptionsOfTheirOwn) {
  Model<float> ours, theirs;
  const cairn_tensor w = ours.w.tensor(), dw = ours.dw.tensor();
  const cairn_tensor b = ours.b.tensor(), db = ours.db.tensor();
  cairn_optimizer* optimizer = nullptr;
  expect_ok(cairn_optimizer_create("adam", "lr=0.02 weight_decay=0.1", &w, &dw, 1, &optimizer));
  expect_ok(cairn_optimizer_add_group(optimizer, "weight_decay=0 beta1=0.5", &b, &db, 1));
  const NamedTensors both = theirs.parameters();
  optim::FusedAdam reference({{.parameters = {both[0]}, .lr = 0.02, .weight_decay = 0.1},
                              {.parameters = {both[1]}, .lr = 0.02, .beta1 = 0.5}},
                             {.adamw = false});
  cairn_step_result result;
  for (int step = 0; step < 6; ++step) {
    if (step == 2) {
      expect_ok(cairn_optimizer_set(optimizer, -1, "lr=0.3"));
      reference.set_lr(0.3);
    } else if (step == 4) {
      expect_ok(cairn_optimizer_set(optimizer, 1, "lr=0.01 eps=0.1"));
      reference.groups()[1].lr = 0.01;
      reference.groups()[1].eps = 0.1;
    }
    ours.write_gradients(step), theirs.write_gradients(step);
    expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
    (void)reference.step({.keep_gradients = true});
    expect_same(ours, theirs, "step " + std::to_string(step));
  }
  expect_failed(cairn_optimizer_set(optimizer, 2, "lr=1"), CAIRN_INVALID_ARGUMENT, {"got 2"});
  expect_failed(cairn_optimizer_set(optimizer, -1, "lr=1 momentun=2"), CAIRN_INVALID_ARGUMENT,
                {"got 'momentun'"});
  expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));  // with the rates as before
  (void)reference.step({.keep_gradients = true});
  expect_same(ours, theirs, "after what was refused");
  expect_failed(cairn_optimizer_add_group(optimizer, nullptr, &b, &db, 1), CAIRN_INVALID_ARGUMENT,
                {"b"});
  expect_ok(cairn_free(optimizer));
}

TEST(CapiOptimizer, WrongOptionsAreTold) {
  Model<float> model;
  const cairn_tensor w = model.w.tensor(), dw = model.dw.tensor(), db = model.db.tensor();
  cairn_optimizer* none = nullptr;
  const auto expect = [&](const char* kind, const char* options, const std::string& text) {
    expect_failed(cairn_optimizer_create(kind, options, &w, &dw, 1, &none), CAIRN_INVALID_ARGUMENT,
                  {text});
  };
  expect("adamm", nullptr,
         "expected adam, adamw, sgd, adagrad, rmsprop, lamb or novograd, got 'adamm'");
  expect("adam", "lr", "name=value, got 'lr'");
  expect("adam", "lr=", "name=value");
  expect("adam", "lr=0,1", "a number as lr, got '0,1'");
  expect("adam", "lr=1 lr=2", "each option once");
  expect("adam", "adamw=1", "expected an option of beta1, beta2, eps");
  expect("adam", "beta1=1.5", "betas in [0, 1)");
  expect("sgd", "nesterov=2", "0 or 1");
  expect("sgd", "nesterov=yes", "an integer");
  expect_failed(cairn_optimizer_create("sgd", nullptr, &w, &db, 1, &none), CAIRN_INVALID_ARGUMENT,
                {"one shape", "'w'"});
  expect_failed(cairn_optimizer_create("sgd", nullptr, &w, &dw, 0, &none), CAIRN_INVALID_ARGUMENT,
                {"parameters"});
  cairn_tensor nameless = w;
  nameless.name = nullptr;
  expect_failed(cairn_optimizer_create("sgd", nullptr, &nameless, &dw, 1, &none),
                CAIRN_INVALID_ARGUMENT, {"a name"});
  Array<double> wide("w", {3, 5}, std::vector<double>(15)),
      slope("dw", {3, 5}, std::vector<double>(15));
  const cairn_tensor f64 = wide.tensor(), df64 = slope.tensor();
  EXPECT_EQ(cairn_optimizer_create("sgd", nullptr, &f64, &dw, 1, &none), CAIRN_INVALID_ARGUMENT);
  EXPECT_EQ(cairn_optimizer_create("sgd", nullptr, &w, &df64, 1, &none), CAIRN_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
}

TEST(CapiOptimizer, AnOverflowIsSkippedAndNamed) {
  Model<float> model, untouched;
  cairn_optimizer* const optimizer = model.optimizer("adamw", nullptr);
  model.write_gradients(0);
  model.db.values[3] = INFINITY;
  cairn_step_result result;
  expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
  EXPECT_EQ(result.applied, 0);
  EXPECT_THAT(result.reason, testing::HasSubstr("inf in the gradient of b (1 element)"));
  EXPECT_STREQ(result.culprit, "b");
  expect_same(model, untouched, "skipped");
  expect_failed(cairn_optimizer_step(optimizer, "error_if_nonfinite=1", &result), CAIRN_ERROR,
                {"gradient of b"});
  expect_failed(cairn_optimizer_step(optimizer, "collapse_after=2", &result),
                CAIRN_GRADIENT_COLLAPSE, {"b"});
  expect_failed(cairn_optimizer_step(optimizer, "keep_gradients=1", &result),
                CAIRN_INVALID_ARGUMENT, {"keep_gradients"});
  model.write_gradients(1);
  expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
  EXPECT_EQ(result.applied, 1);
  EXPECT_STREQ(result.reason, "");
  expect_ok(cairn_free(optimizer));
}

// A half weight that the trainer clamps goes on from there; its master would undo it.
TEST(CapiOptimizer, WhatTheTrainerWritesIsFollowed) {
  Model<BFloat16> model;
  cairn_optimizer* const optimizer = model.optimizer("sgd", "lr=0.001");
  cairn_step_result result;
  model.write_gradients(0);
  expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
  expect_ok(cairn_optimizer_weights_written(optimizer));
  for (BFloat16& w : model.w.values) w = BFloat16(8.0f);
  model.write_gradients(1);
  expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
  for (const BFloat16& w : model.w.values) EXPECT_NEAR(static_cast<float>(w), 8.0f, 0.1f);
  expect_ok(cairn_free(optimizer));
}

TEST(CapiScaling, TheRuleIsThatOfCxx) {
  cairn_scaler* scaler = nullptr;
  expect_ok(cairn_scaler_create(
      "init_scale=64 growth_factor=4 backoff_factor=0.25 growth_interval=3 min_scale=2 "
      "max_scale=512 hysteresis=2 consecutive_hysteresis=0",
      &scaler));
  amp::LossScaler reference({true, 64, 4, 0.25, 3, 2, 512, 2, false});
  for (int step = 0; step < 200; ++step) {
    const bool overflow = step % 7 == 3 || (step / 20) % 3 == 1;
    expect_ok(cairn_scaler_update(scaler, overflow ? 1 : 0));
    reference.update(overflow);
    double scale = 0;
    expect_ok(cairn_scaler_scale(scaler, &scale));
    ASSERT_EQ(scale, reference.scale()) << step;
  }
  expect_failed(cairn_scaler_update(scaler, 2), CAIRN_INVALID_ARGUMENT, {"got 2"});
  cairn_scaler* none = nullptr;
  expect_failed(cairn_scaler_create("growth_factor=0.5", &none), CAIRN_INVALID_ARGUMENT, {"0.5"});
  expect_ok(cairn_free(scaler));
}

TEST(CapiScaling, AScaledStepIsThatOfCxx) {
  Model<Half> ours, theirs;
  cairn_optimizer* const optimizer = ours.optimizer("adamw", "lr=0.02");
  optim::FusedAdam rule(theirs.parameters(), {.lr = 0.02});
  cairn_scaled_step* scaled = nullptr;
  expect_ok(
      cairn_scaled_step_create(optimizer, "init_scale=1024 growth_interval=2", nullptr, &scaled));
  amp::ScaledStep reference(rule, {.init_scale = 1024, .growth_interval = 2});
  for (int step = 0; step < 12; ++step) {
    double scale = 0;
    expect_ok(cairn_scaled_step_scale(scaled, &scale));
    ASSERT_EQ(scale, reference.scale());
    ours.write_gradients(step, static_cast<float>(scale));
    if (step == 5) ours.dw.values[2] = Half(INFINITY);
    theirs.dw.values = ours.dw.values, theirs.db.values = ours.db.values;
    cairn_step_result result;
    expect_ok(cairn_scaled_step_run(scaled, "max_gradient_norm=1", &result));
    const optim::StepResult expected = reference.step({.max_gradient_norm = 1});
    EXPECT_EQ(result.applied, expected.applied ? 1 : 0);
    EXPECT_EQ(result.reason, expected.reason);
    expect_same(ours, theirs, "step " + std::to_string(step));
  }
  cairn_step_result result;
  expect_failed(cairn_scaled_step_run(scaled, "check=0", &result), CAIRN_INVALID_ARGUMENT,
                {"check"});
  expect_ok(cairn_free(optimizer));
  expect_ok(cairn_free(scaled));
}

}  // namespace
}  // namespace cairn::test
