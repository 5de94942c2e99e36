// What initialize does to a model: dtypes, masters, casts around forward, refusals.
#include <gmock/gmock.h>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/memory.h"
#include "support.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

DType dtype_of(const nn::Module& model, const std::string& name) {
  for (const NamedTensors& list : {model.parameters(), model.buffers()}) {
    for (const NamedTensor& entry : list) {
      if (entry.name == name) return entry.tensor.dtype();
    }
  }
  ADD_FAILURE() << name;
  return DType::boolean;
}

TEST(Initialize, CastsWhatTheLevelSays) {
  for (const DType half : kHalves) {
    for (const OptLevel level : kLevels) {
      for (const auto keep : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
        const bool casts = level == OptLevel::O2 || level == OptLevel::O3;
        if (keep && !casts) continue;
        const Classifier run({.opt_level = level, .half_dtype = half, .keep_batchnorm_fp32 = keep});
        const nn::Sequential& model = run.model;
        SCOPED_TRACE(run.precision.describe());
        const DType weights = casts ? half : DType::f32;
        const bool norm_f32 = !casts || keep.value_or(level == OptLevel::O2);
        EXPECT_EQ(dtype_of(model, "0.weight"), weights);
        EXPECT_EQ(dtype_of(model, "3.bias"), weights);
        EXPECT_EQ(dtype_of(model, "1.weight"), norm_f32 ? DType::f32 : half);
        EXPECT_EQ(dtype_of(model, "1.bias"), norm_f32 ? DType::f32 : half);
        EXPECT_EQ(dtype_of(model, "1.running_var"), DType::f32);
        for (const auto& [name, tensor] : model.parameters()) {
          EXPECT_EQ(tensor.gradient_slot().memory().dtype(), tensor.dtype()) << name;
          EXPECT_EQ(kernels::MasterWeight::exists(tensor),
                    level == OptLevel::O2 && tensor.dtype() == half)
              << name;
        }
      }
    }
  }
}

TEST(Initialize, BatchNormWithoutWeightsKeepsItsStatistics) {
  for (const OptLevel level : {OptLevel::O2, OptLevel::O3}) {
    Classifier run({.opt_level = level, .half_dtype = DType::bf16}, {},
                   nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16, {.affine = false}),
                                  nn::Linear(16, 4)));
    EXPECT_EQ(dtype_of(run.model, "1.running_mean"), DType::f32);
    const Values before = values(run.model.buffers()[0].tensor);
    run.train(1, 2);
    EXPECT_NE(values(run.model.buffers()[0].tensor), before);
  }
}

/// One weight under two names.
class Tied : public nn::Module {
 public:
  Tied() : first_(add_module("first", nn::Linear(8, 8))) {
    add_child("second", first_);
    head_ = add_module("head", nn::Linear(8, 4));
  }
  std::string kind() const override { return "Tied"; }
  Tensor forward(const Tensor& x) override { return (*head_)((*first_)((*first_)(x))); }

 private:
  std::shared_ptr<nn::Linear> first_, head_;
};

TEST(Initialize, TiedWeightsAreCastOnceAndTrainAsOne) {
  Tied model;
  optim::FusedAdam optimizer(model.parameters());
  EXPECT_EQ(model.parameters().size(), 4u);
  const Tensor first = model.parameters()[0].tensor;
  const Values before = values(first);
  Amp precision = initialize(model, optimizer, kO2);
  EXPECT_EQ(exact(first), before);
  for (std::uint64_t step = 0; step < 3; ++step) {
    expect_applied(train_step(model, precision, make_batch(step)));
  }
  EXPECT_NE(exact(first), before);
}

TEST(Initialize, MastersHoldTheExactValueInTheOldMemory) {
  nn::Sequential model = make_model();
  const void* memory = model.parameters()[0].tensor.raw_data();
  const std::vector<Values> before = values(model.parameters());
  optim::FusedAdam optimizer(model.parameters());
  (void)initialize(model, optimizer, kO2);
  const NamedTensors cast = model.parameters();
  for (std::size_t i = 0; i < cast.size(); ++i) {
    const Tensor& tensor = cast[i].tensor;
    EXPECT_EQ(exact(tensor), before[i]) << cast[i].name;
    EXPECT_EQ(values(tensor), values(Tensor::from(before[i], tensor.shape(), tensor.dtype())));
    if (tensor.dtype() == DType::f32) continue;
    EXPECT_EQ(kernels::MasterWeight::of(tensor)->tensor().storage()->category(),
              core::MemoryCategory::optimizer_state);
  }
  EXPECT_EQ(kernels::MasterWeight::of(cast[0].tensor)->tensor().raw_data(), memory);
}

TEST(Initialize, MemoryOfOthersIsNotTakenForMasters) {
  nn::Sequential model = make_model();
  const Tensor shared = model.parameters()[0].tensor.detach();
  const Values before = values(shared);
  SgdClassifier run(kO2, {.lr = 1.0}, std::move(model));
  run.train(1, 2);
  EXPECT_EQ(values(shared), before);
}

TEST(Initialize, FrozenParametersAreCastAndKeepTheirMasters) {
  nn::Sequential model = make_model();
  Tensor frozen = model.parameters()[0].tensor;
  const Values before = values(frozen);
  frozen.set_requires_grad(false);
  Classifier run(kO2, {}, std::move(model));
  EXPECT_EQ(frozen.dtype(), DType::f16);
  const Values half = values(frozen);
  run.train(1, 2);
  EXPECT_EQ(values(frozen), half);
  EXPECT_EQ(exact(frozen), before);
}

/// Notes what it sees and passes it on.
class Probe : public nn::Module {
 public:
  struct Seen {
    DType dtype = DType::boolean;
    bool autocast = false;
    DType autocast_dtype = DType::boolean;
  };
  std::string kind() const override { return "Probe"; }
  Tensor forward(const Tensor& x) override {
    *seen_ = {x.dtype(), autograd::autocast_state().enabled, autograd::autocast_state().dtype};
    return x;
  }
  const Seen& seen() const { return *seen_; }

 private:
  std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
};

/// A model without parameters, beside an optimizer of others.
struct Probed {
  explicit Probed(const Options& options) { (void)initialize(model, optimizer, options); }
  Probe model;
  optim::FusedSGD optimizer{NamedTensors{{"another", Tensor::zeros({1})}}, {}};
};

TEST(Initialize, CastsAroundForward) {
  for (const DType half : kHalves) {
    for (const OptLevel level : kLevels) {
      Probed run({.opt_level = level, .half_dtype = half});
      SCOPED_TRACE(core::str(name(level), " ", half));
      for (const DType input : {DType::f32, half}) {
        const DType output = run.model(Tensor::zeros({2, 3}, input)).dtype();
        const bool casts = level == OptLevel::O2 || level == OptLevel::O3;
        const DType inside = casts ? half : level == OptLevel::O0 ? DType::f32 : input;
        EXPECT_EQ(run.model.seen().dtype, inside);
        EXPECT_EQ(output, casts ? DType::f32 : inside);
        EXPECT_EQ(run.model.seen().autocast, level == OptLevel::O1);
        if (level == OptLevel::O1) {
          EXPECT_EQ(run.model.seen().autocast_dtype, half);
        }
      }
      EXPECT_EQ(run.model(Tensor::zeros({2}, DType::i64)).dtype(), DType::i64);
      EXPECT_FALSE(autograd::autocast_state().enabled);
    }
  }
}

TEST(Initialize, CastModelOutputs) {
  for (const OptLevel level : kLevels) {
    Probed run({.opt_level = level, .cast_model_outputs = DType::bf16});
    EXPECT_EQ(run.model(Tensor::zeros({2, 3})).dtype(), DType::bf16) << name(level);
  }
}

TEST(Initialize, AutocastRunsEachOperationInItsDtype) {
  for (const DType half : kHalves) {
    Classifier run({.opt_level = OptLevel::O1, .half_dtype = half});
    const Tensor y = run.model(make_batch(1).x);
    EXPECT_EQ(y.dtype(), half);  // a matrix product
    const Tensor loss = autograd::cross_entropy(y, make_batch(1).labels);
    EXPECT_EQ(loss.dtype(), DType::f32);
    run.precision.backward(loss);
    for (const auto& [name, tensor] : run.model.parameters()) {
      EXPECT_EQ(tensor.grad().dtype(), DType::f32) << name;
    }
  }
}

TEST(Initialize, NamesWhatIsNotF32) {
  const auto refusal_of = [](nn::Module& model) {
    optim::FusedSGD optimizer(NamedTensors{{"another", Tensor::zeros({1})}}, {});
    return message_of([&] { (void)initialize(model, optimizer, kO2); });
  };
  nn::Sequential model = make_model();
  model.parameters()[3].tensor.set_data(Tensor::zeros({16}, DType::bf16));
  EXPECT_THAT(refusal_of(model), HasSubstr("parameter '1.bias' of bf16"));
  EXPECT_EQ(dtype_of(model, "0.weight"), DType::f32);  // nothing was cast
  nn::Sequential other = make_model();
  other.buffers()[1].tensor.set_data(Tensor::zeros({16}, DType::f64));
  EXPECT_THAT(refusal_of(other), HasSubstr("buffer '1.running_var' of f64"));
  nn::Sequential twice = make_model();
  EXPECT_EQ(refusal_of(twice), "nothing thrown");
  EXPECT_THAT(refusal_of(twice), HasSubstr("amp::release(model)"));
}

TEST(Initialize, RefusesListsThatNameOneTwice) {
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters()), another(model.parameters());
  const auto refusal = [](const std::vector<nn::Module*>& models,
                          const std::vector<optim::Optimizer*>& optimizers) {
    return message_of([&] { (void)initialize(models, optimizers, kO2); });
  };
  EXPECT_THAT(refusal({&model, &model}, {&optimizer}), HasSubstr("each model once"));
  EXPECT_THAT(refusal({&model}, {&optimizer, &optimizer}), HasSubstr("each optimizer once"));
  EXPECT_THAT(refusal({&model}, {&optimizer, &another}), HasSubstr("'0.weight'"));
  EXPECT_THAT(refusal({nullptr}, {&optimizer}), HasSubstr("null"));
  EXPECT_EQ(refusal({&model}, {}), "nothing thrown");
}

TEST(Initialize, ReleaseGivesTheF32ValuesBackAndAllowsAnotherTime) {
  for (const OptLevel level : kLevels) {
    Classifier run({.opt_level = level}, {.lr = 1e-2});
    run.train(1, 2);
    const std::vector<Values> before = exact(run.model.parameters());
    EXPECT_THROW((void)initialize(run.model, run.optimizer), core::InvalidArgument);
    run.precision.release();
    for (const NamedTensors& list : {run.model.parameters(), run.model.buffers()}) {
      for (const auto& [name, tensor] : list) EXPECT_EQ(tensor.dtype(), DType::f32) << name;
    }
    EXPECT_EQ(values(run.model.parameters()), before);
    EXPECT_EQ(run.model(make_batch(1).x).dtype(), DType::f32);
    Amp again = initialize(run.model, run.optimizer, kO2);
    expect_applied(train_step(run.model, again, make_batch(2)));
  }
}

TEST(Initialize, AModelWhoseHandleIsGoneIsReleasedByItself) {
  nn::Sequential model = make_model();
  const Tensor first = model.parameters()[0].tensor;
  release(model);  // not initialized: nothing happens
  for (int fold = 0; fold < 3; ++fold) {
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
    {
      Amp precision = initialize(model, optimizer, at(OptLevel::O2, {.fallback_after = 2}));
      expect_applied(train_step(model, precision, make_batch(1)));
    }
    EXPECT_EQ(first.dtype(), DType::f16);
    const Values truth = exact(first);
    release(model);
    EXPECT_EQ(first.dtype(), DType::f32);
    EXPECT_EQ(values(first), truth);
  }
}

TEST(Initialize, DisabledLeavesEverythingAsItIs) {
  SgdClassifier run({.enabled = false, .opt_level = OptLevel::O2, .num_losses = 2}, {.lr = 0.5});
  EXPECT_EQ(dtype_of(run.model, "0.weight"), DType::f32);
  const Tensor loss = Tensor::full({}, 3.0, DType::bf16);
  EXPECT_TRUE(run.precision.scale_loss(loss, {.loss_id = 1}).tensor().same(loss));
  nn::Sequential plain = make_model();
  optim::FusedSGD plain_optimizer(plain.parameters(), {.lr = 0.5});
  autograd::backward(loss_of(plain, make_batch(1)));
  expect_applied(plain_optimizer.step());
  run.train(1, 2);
  EXPECT_EQ(run.everything(), everything(plain, plain_optimizer));
}

TEST(Initialize, OverridesOfSinglePolicies) {
  Classifier run({.cast_policies = {{"linear", autograd::CastPolicy::f32}}}), other({});
  EXPECT_EQ(run.model(make_batch(1).x).dtype(), DType::f32);
  EXPECT_EQ(other.model(make_batch(1).x).dtype(), DType::f16);
  EXPECT_THAT(run.precision.describe(), HasSubstr("autocast f16 but for linear (f32), dynamic"));
  const auto refusal = [](const Options& options) {
    return message_of([&] { Classifier{options}; });
  };
  EXPECT_THAT(refusal({.cast_policies = {{"liner", autograd::CastPolicy::f32}}}),
              HasSubstr("linear"));
  EXPECT_THAT(refusal({.opt_level = OptLevel::O2,
                       .cast_policies = {{"linear", autograd::CastPolicy::f32}}}),
              HasSubstr("with O1"));
}

TEST(Initialize, OverridesOfSingleProperties) {
  Classifier plain({.opt_level = OptLevel::O1, .autocast = false});
  EXPECT_EQ(plain.model(make_batch(1).x).dtype(), DType::f32);
  const Classifier cast({.opt_level = OptLevel::O0, .cast_model_type = DType::f16});
  EXPECT_EQ(dtype_of(cast.model, "0.weight"), DType::f16);
  EXPECT_EQ(dtype_of(cast.model, "1.weight"), DType::f16);
  EXPECT_FALSE(kernels::MasterWeight::exists(cast.parameter(0)));
}

TEST(Initialize, WrongOptionsChangeNothing) {
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  EXPECT_THROW(
      (void)initialize(model, optimizer, {.opt_level = OptLevel::O1, .master_weights = true}),
      core::InvalidArgument);
  EXPECT_THROW(
      (void)initialize(model, optimizer, at(OptLevel::O2, {.scaler = {.growth_interval = 0}})),
      core::InvalidArgument);
  EXPECT_EQ(dtype_of(model, "0.weight"), DType::f32);
}

}  // namespace
}  // namespace cairn::amp
