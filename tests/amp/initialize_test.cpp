// What initialize does to a model: dtypes, masters, casts around forward, refusals.
#include <gmock/gmock.h>

#include <functional>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/step.h"

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
      for (const std::optional<bool> keep :
           {std::optional<bool>(), std::optional(true), std::optional(false)}) {
        const bool casts = level == OptLevel::O2 || level == OptLevel::O3;
        if (keep && !casts) continue;
        nn::Sequential model = make_model();
        optim::FusedAdam optimizer(model.parameters());
        const Amp precision =
            initialize(model, optimizer,
                       {.opt_level = level, .half_dtype = half, .keep_batchnorm_fp32 = keep});
        SCOPED_TRACE(precision.describe());
        const DType weights = casts ? half : DType::f32;
        const bool norm_f32 = !casts || keep.value_or(level == OptLevel::O2);
        EXPECT_EQ(dtype_of(model, "0.weight"), weights);
        EXPECT_EQ(dtype_of(model, "3.bias"), weights);
        EXPECT_EQ(dtype_of(model, "1.weight"), norm_f32 ? DType::f32 : half);
        EXPECT_EQ(dtype_of(model, "1.bias"), norm_f32 ? DType::f32 : half);
        EXPECT_EQ(dtype_of(model, "1.running_var"), DType::f32);
        for (const auto& [name, tensor] : model.parameters()) {
          EXPECT_EQ(tensor.gradient_slot().memory().dtype(), tensor.dtype())
              << name;  // a slot of its own dtype
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
    nn::Sequential model(nn::Linear(8, 16), nn::BatchNorm1d(16, {.affine = false}),
                         nn::Linear(16, 4));
    optim::FusedAdam optimizer(model.parameters());
    Amp precision = initialize(model, optimizer, {.opt_level = level, .half_dtype = DType::bf16});
    EXPECT_EQ(dtype_of(model, "1.running_mean"), DType::f32);
    const std::vector<double> before = values(model.buffers()[0].tensor);
    EXPECT_TRUE(train_step(model, precision, make_batch(1)).applied);
    EXPECT_NE(values(model.buffers()[0].tensor), before);
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
  const std::vector<double> exact = values(model.parameters()[0].tensor);
  Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2});
  EXPECT_EQ(values(kernels::MasterWeight::of(model.parameters()[0].tensor)->tensor()), exact);
  for (std::uint64_t step = 0; step < 3; ++step) {
    EXPECT_TRUE(train_step(model, precision, make_batch(step)).applied);
  }
  EXPECT_NE(values(kernels::MasterWeight::of(model.parameters()[0].tensor)->tensor()), exact);
}

TEST(Initialize, MastersHoldTheExactValueInTheOldMemory) {
  nn::Sequential model = make_model();
  const nn::Sequential same = make_model();
  const void* memory = model.parameters()[0].tensor.raw_data();
  optim::FusedAdam optimizer(model.parameters());
  initialize(model, optimizer, {.opt_level = OptLevel::O2});
  const NamedTensors cast = model.parameters(), exact = same.parameters();
  for (std::size_t i = 0; i < cast.size(); ++i) {
    const Tensor& tensor = cast[i].tensor;
    if (tensor.dtype() == DType::f32) continue;
    EXPECT_EQ(values(kernels::MasterWeight::of(tensor)->tensor()), values(exact[i].tensor))
        << cast[i].name;
    EXPECT_EQ(values(tensor),
              values(Tensor::from(values(exact[i].tensor), tensor.shape(), DType::f16)));
    EXPECT_EQ(kernels::MasterWeight::of(tensor)->tensor().storage()->category(),
              core::MemoryCategory::optimizer_state);
  }
  EXPECT_EQ(kernels::MasterWeight::of(cast[0].tensor)->tensor().raw_data(), memory);
}

TEST(Initialize, MemoryOfOthersIsNotTakenForMasters) {
  nn::Sequential model = make_model();
  const Tensor shared = model.parameters()[0].tensor.detach();
  const std::vector<double> before = values(shared);
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2});
  EXPECT_TRUE(train_step(model, precision, make_batch(1)).applied);
  EXPECT_EQ(values(shared), before);
}

TEST(Initialize, FrozenParametersAreCastAndKeepTheirMasters) {
  nn::Sequential model = make_model();
  const Tensor frozen = model.parameters()[0].tensor;
  const std::vector<double> exact = values(frozen);
  model.parameters()[0].tensor.set_requires_grad(false);
  optim::FusedAdam optimizer(model.parameters());
  Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2});
  EXPECT_EQ(frozen.dtype(), DType::f16);
  const std::vector<double> before = values(frozen);
  EXPECT_TRUE(train_step(model, precision, make_batch(1)).applied);
  EXPECT_EQ(values(frozen), before);
  EXPECT_EQ(values(kernels::master_value(frozen)), exact);
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

TEST(Initialize, CastsAroundForward) {
  for (const DType half : kHalves) {
    for (const OptLevel level : kLevels) {
      Probe model;
      optim::FusedSGD optimizer(NamedTensors{{"another", Tensor::zeros({1})}}, {});
      initialize(model, optimizer, {.opt_level = level, .half_dtype = half});
      SCOPED_TRACE(core::str(name(level), " ", half));
      for (const DType input : {DType::f32, half}) {
        const DType output = model(Tensor::zeros({2, 3}, input)).dtype();
        const bool casts = level == OptLevel::O2 || level == OptLevel::O3;
        const DType inside = casts ? half : level == OptLevel::O0 ? DType::f32 : input;
        EXPECT_EQ(model.seen().dtype, inside);
        EXPECT_EQ(output, casts ? DType::f32 : inside);
        EXPECT_EQ(model.seen().autocast, level == OptLevel::O1);
        if (level == OptLevel::O1) {
          EXPECT_EQ(model.seen().autocast_dtype, half);
        }
      }
      EXPECT_EQ(model(Tensor::zeros({2}, DType::i64)).dtype(), DType::i64);
      EXPECT_FALSE(autograd::autocast_state().enabled);
    }
  }
}

TEST(Initialize, AutocastRunsEachOperationInItsDtype) {
  for (const DType half : kHalves) {
    nn::Sequential model = make_model();
    optim::FusedAdam optimizer(model.parameters());
    Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O1, .half_dtype = half});
    const Tensor y = model(make_batch(1).x);
    EXPECT_EQ(y.dtype(), half);  // a matrix product
    const Tensor loss = autograd::cross_entropy(y, make_batch(1).labels);
    EXPECT_EQ(loss.dtype(), DType::f32);
    precision.backward(loss);
    for (const auto& [name, tensor] : model.parameters())
      EXPECT_EQ(tensor.grad().dtype(), DType::f32) << name;
  }
}

TEST(Initialize, NamesWhatIsNotF32) {
  const auto error_of = [](nn::Module& model) -> std::string {
    optim::FusedSGD optimizer(NamedTensors{{"another", Tensor::zeros({1})}}, {});
    try {
      initialize(model, optimizer, {.opt_level = OptLevel::O2});
    } catch (const core::InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  nn::Sequential model = make_model();
  model.parameters()[3].tensor.set_data(Tensor::zeros({16}, DType::bf16));
  EXPECT_THAT(error_of(model), HasSubstr("parameter '1.bias' of bf16"));
  EXPECT_EQ(dtype_of(model, "0.weight"), DType::f32);  // nothing was cast
  nn::Sequential other = make_model();
  other.buffers()[1].tensor.set_data(Tensor::zeros({16}, DType::f64));
  EXPECT_THAT(error_of(other), HasSubstr("buffer '1.running_var' of f64"));
  nn::Sequential twice = make_model();
  EXPECT_EQ(error_of(twice), "no error");
  EXPECT_THAT(error_of(twice), HasSubstr("amp::release(model)"));
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const core::Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Initialize, RefusesListsThatNameOneTwice) {
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  EXPECT_THAT(error_of([&] {
                initialize({&model, &model}, {&optimizer});
              }),
              HasSubstr("each model once"));
  EXPECT_THAT(error_of([&] {
                initialize({&model}, {&optimizer, &optimizer});
              }),
              HasSubstr("each optimizer once"));
  EXPECT_THAT(error_of([&] { initialize({nullptr}, {&optimizer}); }), HasSubstr("null"));
  EXPECT_EQ(error_of([&] { initialize({&model}, {}, {.opt_level = OptLevel::O2}); }), "no error");
}

TEST(Initialize, RefusesAParameterOfTwoOptimizers) {
  nn::Sequential model = make_model();
  const optim::SgdOptions options{.lr = 0.1};
  optim::FusedSGD first(model.parameters(), options), second(model.parameters(), options);
  EXPECT_THROW(initialize({&model}, {&first, &second}, {}), core::InvalidArgument);
}

TEST(Initialize, ReleaseGivesTheF32ValuesBackAndAllowsAnotherTime) {
  for (const OptLevel level : kLevels) {
    nn::Sequential model = make_model();
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
    Amp precision = initialize(model, optimizer, {.opt_level = level});
    test::expect_applied(train_step(model, precision, make_batch(1)));
    const StateDict exact = snapshot(model.state_dict());
    EXPECT_THROW(initialize(model, optimizer), core::InvalidArgument);
    precision.release();
    for (const NamedTensors& list : {model.parameters(), model.buffers()}) {
      for (const auto& [name, tensor] : list) EXPECT_EQ(tensor.dtype(), DType::f32) << name;
    }
    for (const char* layer : {"0", "1", "3"}) {
      const StateDict now = model.state_dict();
      EXPECT_EQ(values(now.dict(layer).tensor("weight")),
                values(exact.dict(layer).tensor("weight")));
    }
    EXPECT_EQ(model(make_batch(1).x).dtype(), DType::f32);
    Amp again = initialize(model, optimizer, {.opt_level = OptLevel::O2});
    EXPECT_TRUE(train_step(model, again, make_batch(2)).applied);
  }
}

TEST(Initialize, AModelWhoseHandleIsGoneIsReleasedByItself) {
  nn::Sequential model = make_model();
  release(model);  // not initialized: nothing happens
  for (int fold = 0; fold < 3; ++fold) {
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
    {
      Amp precision =
          initialize(model, optimizer, {.opt_level = OptLevel::O2, .fallback_after = 2});
      EXPECT_TRUE(train_step(model, precision, make_batch(1)).applied);
    }
    const std::vector<double> truth =
        values(kernels::MasterWeight::of(model.parameters()[0].tensor)->tensor());
    release(model);
    EXPECT_EQ(dtype_of(model, "0.weight"), DType::f32);
    EXPECT_EQ(values(model.parameters()[0].tensor), truth);
  }
}

TEST(Initialize, DisabledLeavesEverythingAsItIs) {
  nn::Sequential model = make_model();
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.5});
  Amp precision =
      initialize(model, optimizer, {.enabled = false, .opt_level = OptLevel::O2, .num_losses = 2});
  EXPECT_EQ(dtype_of(model, "0.weight"), DType::f32);
  const Tensor loss = Tensor::full({}, 3.0, DType::bf16);
  EXPECT_TRUE(precision.scale_loss(loss, {.loss_id = 1}).tensor().same(loss));
  nn::Sequential plain = make_model();
  optim::FusedSGD plain_optimizer(plain.parameters(), {.lr = 0.5});
  autograd::backward(loss_of(plain, make_batch(1)));
  test::expect_applied(plain_optimizer.step());
  EXPECT_TRUE(train_step(model, precision, make_batch(1)).applied);
  EXPECT_EQ(everything(model, optimizer), everything(plain, plain_optimizer));
}

TEST(Initialize, CastModelOutputs) {
  for (const OptLevel level : kLevels) {
    Probe model;
    optim::FusedSGD optimizer(NamedTensors{{"another", Tensor::zeros({1})}}, {});
    initialize(model, optimizer, {.opt_level = level, .cast_model_outputs = DType::bf16});
    EXPECT_EQ(model(Tensor::zeros({2, 3})).dtype(), DType::bf16) << name(level);
  }
}

TEST(Initialize, OverridesOfSinglePolicies) {
  nn::Sequential model = make_model(), other = make_model();
  optim::FusedAdam optimizer(model.parameters()), other_optimizer(other.parameters());
  const Amp precision =
      initialize(model, optimizer, {.cast_policies = {{"linear", autograd::CastPolicy::f32}}});
  initialize(other, other_optimizer);
  EXPECT_EQ(model(make_batch(1).x).dtype(), DType::f32);
  EXPECT_EQ(other(make_batch(1).x).dtype(), DType::f16);
  EXPECT_THAT(precision.describe(), HasSubstr("autocast f16 but for linear"));
  const auto refused = [&](const Options& options) {
    nn::Sequential fresh = make_model();
    optim::FusedAdam its(fresh.parameters());
    return error_of([&] { initialize(fresh, its, options); });
  };
  EXPECT_THAT(refused({.cast_policies = {{"liner", autograd::CastPolicy::f32}}}),
              HasSubstr("linear"));
  EXPECT_THAT(refused({.opt_level = OptLevel::O2,
                       .cast_policies = {{"linear", autograd::CastPolicy::f32}}}),
              HasSubstr("with O1"));
}

TEST(Initialize, OverridesOfSingleProperties) {
  nn::Sequential plain = make_model(), cast = make_model();
  optim::FusedAdam plain_optimizer(plain.parameters()), cast_optimizer(cast.parameters());
  initialize(plain, plain_optimizer, {.opt_level = OptLevel::O1, .autocast = false});
  EXPECT_EQ(plain(make_batch(1).x).dtype(), DType::f32);
  initialize(cast, cast_optimizer, {.opt_level = OptLevel::O0, .cast_model_type = DType::f16});
  EXPECT_EQ(dtype_of(cast, "0.weight"), DType::f16);
  EXPECT_EQ(dtype_of(cast, "1.weight"), DType::f16);
  EXPECT_FALSE(kernels::MasterWeight::exists(cast.parameters()[0].tensor));
}

TEST(Initialize, WrongOptionsChangeNothing) {
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  EXPECT_THROW(initialize(model, optimizer, {.opt_level = OptLevel::O1, .master_weights = true}),
               core::InvalidArgument);
  EXPECT_THROW(
      initialize(model, optimizer, {.opt_level = OptLevel::O2, .scaler = {.growth_interval = 0}}),
      core::InvalidArgument);
  EXPECT_EQ(dtype_of(model, "0.weight"), DType::f32);
}

}  // namespace
}  // namespace cairn::amp
