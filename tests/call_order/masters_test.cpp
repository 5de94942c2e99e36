// Who owns a weight: orders of calls that once lost its exact value, or undid a write.
#include "support.h"
#include "support/cpu_only.h"
#include "support/step.h"

namespace cairn::orders {
namespace {

using testing::HasSubstr;

constexpr double kExact = static_cast<double>(1.1F);  // no half type holds it

StateDict exact_state() {
  return Pair().state_dict();
}

TEST(Masters, AStateLoadedIntoAHalfModelKeepsItsExactValue) {
  Pair model;
  model.to(DType::bf16);
  model.load_state_dict(exact_state());
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.0});
  EXPECT_EQ(value(model.a()), kExact);
  autograd::backward(autograd::sum(model.a()));
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_EQ(value(model.a()), kExact);
}

TEST(Masters, AStateLoadedAfterUnfreezingKeepsItsExactValue) {
  Pair model;
  model.b().set_requires_grad(false);
  optim::FusedSGD optimizer(model.parameters());
  (void)amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  model.b().set_requires_grad(true);
  model.load_state_dict(exact_state());
  EXPECT_EQ(value(model.b()), kExact);
}

TEST(Masters, AFrozenWeightKeepsItsExactValueInAnyOrder) {
  for (const DType half : {DType::f16, DType::bf16}) {
    for (const bool loads : {false, true}) {
      for (const bool known : {false, true}) {
        Pair model;
        const NamedTensors all = model.parameters();
        model.b().set_requires_grad(false);
        optim::FusedSGD optimizer(known ? all : NamedTensors{all[0]}, {.lr = 0.0});
        amp::Amp precision = amp::initialize(
            model, optimizer,
            {.opt_level = amp::OptLevel::O2, .half_dtype = half, .loss_scale = 1.0});
        if (loads) model.load_state_dict(exact_state());
        EXPECT_EQ(value(model.b()), kExact);
        EXPECT_EQ(model.state_dict().tensor("b").to_vector().front(), kExact);
        model.b().set_requires_grad(true);
        precision.backward(model(input(0.25)));
        EXPECT_TRUE(precision.step().applied);
        EXPECT_EQ(value(model.b()), kExact);
        model.b().set_requires_grad(false);
        precision.release();
        EXPECT_EQ(model.b().dtype(), DType::f32);
        EXPECT_EQ(value(model.b()), kExact);
      }
    }
  }
}

TEST(Masters, AFrozenWeightMayBeItsHalfValueAlone) {
  Pair model;
  model.b().set_requires_grad(false);
  optim::FusedSGD optimizer(model.parameters());
  const auto masters = [] {
    return core::memory_stats(core::default_device()).of(core::MemoryCategory::optimizer_state);
  };
  const std::size_t before = masters();
  amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  EXPECT_EQ(masters() - before, 2 * 4 * sizeof(float));
  kernels::MasterWeight::drop(model.b());
  EXPECT_EQ(masters() - before, 4 * sizeof(float));
  const double rounded = value(model.b());
  EXPECT_NE(rounded, kExact);
  model.load_state_dict(exact_state());
  EXPECT_EQ(value(model.b()), rounded);
}

TEST(Masters, ALayerThatFellBackTakesItsExactValueInAnyOrderOfLoading) {
  const auto make_options = [] {
    return amp::Options{.opt_level = amp::OptLevel::O3, .loss_scale = 1.0, .fallback_after = 1};
  };
  StateDict layers;
  layers.set("0", std::string("Pair"));
  for (const bool model_first : {true, false}) {
    Pair model;
    optim::FusedSGD optimizer(model.parameters());
    amp::Amp precision = amp::initialize(model, optimizer, make_options());
    StateDict state = precision.state_dict();
    state.set("fp32_layers", layers);
    if (model_first) model.load_state_dict(exact_state());
    precision.load_state_dict(state);
    if (!model_first) model.load_state_dict(exact_state());
    EXPECT_EQ(model.a().dtype(), DType::f32);
    EXPECT_EQ(value(model.a()), kExact) << model_first;
  }
}

TEST(Masters, AWriteToAHalfWeightCounts) {
  const auto writes = std::vector<std::function<void(Tensor)>>{
      [](Tensor w) { nn::init::constant(w, 0.5); }, [](Tensor w) { kernels::fill(w, 0.5); },
      [](Tensor w) { kernels::axpby(0.25, Tensor::full({4}, 2.0, w.dtype()), 0.0, w); }};
  for (const optim::MasterStorage storage :
       {optim::MasterStorage::f32, optim::MasterStorage::remainder}) {
    for (std::size_t k = 0; k < writes.size(); ++k) {
      Pair model;
      optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
      optimizer.set_state_options({.masters = storage});
      amp::Amp precision = amp::initialize(
          model, optimizer, {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16});
      writes[k](model.a());
      EXPECT_EQ(value(model.a()), 0.5) << k;
      precision.backward(model(input(1.0)));
      EXPECT_TRUE(precision.step().applied);
      EXPECT_NEAR(value(model.a()), 0.4, 1e-6) << k;
      EXPECT_NEAR(value(model.b()), 1.0, 1e-6) << k;
    }
  }
}

TEST(Masters, AClampLeavesExactWhatItDoesNotTouch) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters());
  (void)amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  Tensor w = model.a();
  const Tensor half = Tensor::from(std::vector<double>{3.0, 1.1, -2.0, 1.1}, {4}, DType::f16);
  kernels::copy(half, w);  // two elements as they were
  EXPECT_EQ(kernels::master_value(w).to_vector(), (std::vector<double>{3.0, kExact, -2.0, kExact}));
}

constexpr optim::MasterStorage kStorages[] = {optim::MasterStorage::f32,
                                              optim::MasterStorage::remainder};

/// 100 steps of 1e-4, of which bf16 sees none alone.
void train_in_small_steps(optim::MasterStorage storage, const std::function<void(Pair&)>& write) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1e-4});
  optimizer.set_state_options({.masters = storage});
  amp::Amp precision = amp::initialize(model, optimizer,
                                       {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16});
  for (int step = 0; step < 100; ++step) {
    precision.backward(model(input(1.0)));
    EXPECT_TRUE(precision.step().applied);
    write(model);
  }
  EXPECT_NEAR(value(model.a()), kExact - 0.01, 2e-6);
  EXPECT_NEAR(value(model.b()), kExact - 0.01, 2e-6);
}

TEST(Masters, WeightsThatAreClampedAfterEachStepStillMove) {
  for (const optim::MasterStorage storage : kStorages) {
    train_in_small_steps(
        storage, [](Pair& model) { kernels::unary(kernels::UnaryOp::relu, model.a(), model.a()); });
  }
}

TEST(Masters, WeightsWithAPointerToThemStillMove) {
  CAIRN_CPU_ONLY("writes through a host pointer");
  for (const optim::MasterStorage storage : kStorages) {
    core::BFloat16* kept = nullptr;
    float other = 2;
    train_in_small_steps(storage, [&](Pair& model) {
      if (kept == nullptr) kept = model.a().data<core::BFloat16>();
      other = 5 - other;
      kept[3] = core::BFloat16(other);
      EXPECT_EQ(kernels::master_value(model.a()).to_vector()[3], other);
    });
  }
}

TEST(Masters, AnAverageInPlaceOfAHalfModelsStateIsRefused) {
  for (const auto level : {amp::OptLevel::O2, amp::OptLevel::O3}) {
    Pair model;
    optim::FusedSGD optimizer(model.parameters());
    (void)amp::initialize(model, optimizer, {.opt_level = level});
    const double before = value(model.a());
    const auto average = [](const nn::Module& of) {
      kernels::axpby(0.5, Tensor::full({4}, 2.0), 0.5, of.state_dict().tensor("a"));
    };
    EXPECT_THAT(refusal([&] { average(model); }), HasSubstr("kernels::write_weight"));
    EXPECT_EQ(value(model.a()), before);
    if (level == amp::OptLevel::O3) continue;  // the clone's state is its half weights
    const auto clone = model.clone();
    EXPECT_THAT(refusal([&] { average(*clone); }), HasSubstr("the half weight a itself"));
    EXPECT_EQ(value(clone->parameters().front().tensor), kExact);
  }
}

TEST(Masters, AnAverageInPlaceOfAnF32ModelsStateTakesEffect) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters());
  (void)amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O1});
  kernels::axpby(0.5, Tensor::full({4}, 2.0), 0.5, model.state_dict().tensor("a"));
  EXPECT_NEAR(value(model.a()), 1.55, 1e-6);
}

TEST(Masters, AWriteToAStateOfOnesOwnIsNobodysBusiness) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters());
  amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  const Tensor exact = model.state_dict().tensor("a"), own = Tensor::empty_like(exact);
  kernels::copy(exact, own);
  kernels::fill(own, 0.0);
  precision.release();  // what was the master is the weight
  kernels::fill(model.a(), 0.5);
  EXPECT_EQ(value(model.a()), 0.5);
}

TEST(Masters, AClonesWeightsAreTheExactOnes) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters());
  (void)amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  const auto clone = model.clone();
  for (const NamedTensor& parameter : clone->parameters()) {
    EXPECT_EQ(parameter.tensor.dtype(), DType::f16);
    EXPECT_EQ(value(parameter.tensor), kExact);
  }
}

TEST(Masters, AModelCastBackToF32HasItsExactValues) {
  Pair model;
  optim::FusedSGD optimizer(model.parameters());
  (void)amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  model.to(DType::f32);
  EXPECT_EQ(value(model.a()), kExact);
}

TEST(States, AParameterMayBeCalledStep) {
  class Step : public nn::Module {
   public:
    Step() : step_(add_parameter("step", Tensor::full({2}, 1.0))) {}
    std::string kind() const override { return "Step"; }
    Tensor forward(const Tensor& x) override { return autograd::sum(autograd::mul(step_, x)); }

   private:
    Tensor step_;
  };
  class Outer : public nn::Module {
   public:
    Outer() : inner_(add_module("inner", Step())), step_(add_module("step", Step())) {}
    std::string kind() const override { return "Outer"; }
    Tensor forward(const Tensor& x) override { return autograd::add((*inner_)(x), (*step_)(x)); }

   private:
    std::shared_ptr<Step> inner_, step_;
  };
  Outer model, other;
  optim::FusedAdam optimizer(model.parameters()), others(other.parameters());
  autograd::backward(model(Tensor::full({2}, 1.0)));
  test::expect_applied(optimizer.step());
  others.load_state_dict(optimizer.state_dict());
  EXPECT_EQ(others.steps(), 1);
}

TEST(States, OtherOptionsAreTakenOverWithAWord) {
  Pair model, other;
  optim::FusedAdam saved(model.parameters(), {.beta2 = 0.95, .bias_correction = false});
  optim::FusedAdam loaded(other.parameters(), {.beta2 = 0.999});
  testing::internal::CaptureStderr();
  loaded.load_state_dict(saved.state_dict());
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(loaded.groups().front().beta2, 0.95);
  EXPECT_THAT(said, HasSubstr("continues with beta2 0.95 of the state, not 0.999"));
  EXPECT_THAT(said, HasSubstr("continues with its own bias_correction 1"));
}

}  // namespace
}  // namespace cairn::orders
