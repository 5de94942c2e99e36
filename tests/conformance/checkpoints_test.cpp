// What a checkpoint restores, loss scales in it, its dtypes.
#include <gtest/gtest.h>

#include <optional>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "support/state.h"
#include "support/tensors.h"

namespace cairn::conformance {
namespace {

using amp::OptLevel;

/// Conv2d(3, 6, 3, padding 1), batch norm, times a parameter.
class Net : public nn::Module {
 public:
  Net()
      : conv_(add_module("conv1", nn::Conv2d(3, 6, 3, {.padding = 1}))),
        norm_(add_module("bn1", nn::BatchNorm2d(6))),
        scale_(add_parameter("param", Tensor::full({1}, 1.0))) {}
  std::string kind() const override { return "Net"; }
  Tensor forward(const Tensor& x) override {
    const Tensor y = autograd::relu((*norm_)((*conv_)(autograd::mul(x, scale_))));
    return y;
  }

 private:
  std::shared_ptr<nn::Conv2d> conv_;
  std::shared_ptr<nn::BatchNorm2d> norm_;
  Tensor scale_;
};

Tensor random_input(const Shape& shape, std::uint64_t seed) {
  return test::random_tensor(shape, DType::f32, core::default_device(), seed);
}

void expect_no_half(const StateDict& state) {
  for (const auto& [key, value] : state) {
    if (const auto* tensor = std::get_if<Tensor>(&value)) {
      EXPECT_FALSE(core::is_half(tensor->dtype())) << key;
    }
    if (const auto* child = std::get_if<StateDict>(&value)) expect_no_half(*child);
  }
}

void expect_equal(nn::Module& a, nn::Module& b) {
  const NamedTensors left = a.parameters(), right = b.parameters();
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].tensor.to_vector<double>(), right[i].tensor.to_vector<double>())
        << left[i].name;
  }
}

struct CheckpointsTrained {
  explicit CheckpointsTrained(std::uint64_t seed = 2809) {
    manual_seed(seed);
    model = std::make_unique<Net>();
    optimizer =
        std::make_unique<optim::FusedSGD>(model->parameters(), optim::SgdOptions{.lr = 1e-3});
  }
  void initialize(OptLevel level, int num_losses) {
    precision = amp::initialize(*model, *optimizer, {.opt_level = level, .num_losses = num_losses});
  }
  /// One epoch; returns the output. A step may overflow and be skipped.
  Tensor train(std::uint64_t epoch, int num_losses) {
    const Tensor x = random_input({16, 3, 24, 24}, epoch);
    const Tensor y = (*model)(x);
    for (int id = 0; id < num_losses; ++id) {
      const Tensor loss = autograd::mean(id == 0 ? y : (*model)(x));
      precision->backward(loss, {.loss_id = id});
    }
    applied = precision->step().applied;
    return y;
  }
  std::unique_ptr<Net> model;
  std::unique_ptr<optim::FusedSGD> optimizer;
  std::optional<amp::Amp> precision;
  bool applied = false;
};

TEST(Restoring, ParametersStayBitEqualAfterALoadInEitherOrder) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    for (const bool amp_before_load : {true, false}) {
      for (const int num_losses : {1, 2}) {
        SCOPED_TRACE(core::str(amp::name(level),
                               amp_before_load ? ", initialize first, " : ", load first, ",
                               num_losses, " losses"));
        CheckpointsTrained run;
        run.initialize(level, num_losses);
        CheckpointsTrained restored(1);
        for (std::uint64_t epoch = 0; epoch < 10; ++epoch) {
          if (epoch == 5) {
            const StateDict model = test::snapshot(run.model->state_dict());
            const StateDict optimizer = test::snapshot(run.optimizer->state_dict());
            const StateDict precision = test::snapshot(run.precision->state_dict());
            expect_no_half(model);
            if (amp_before_load) restored.initialize(level, num_losses);
            restored.model->load_state_dict(model);
            restored.optimizer->load_state_dict(optimizer);
            if (!amp_before_load) restored.initialize(level, num_losses);
            restored.precision->load_state_dict(precision);
          }
          const Tensor y = run.train(epoch, num_losses);
          if (epoch < 5) continue;
          const Tensor again = restored.train(epoch, num_losses);
          EXPECT_TRUE(restored.applied);
          EXPECT_EQ(y.to_vector<double>(), again.to_vector<double>());
          expect_equal(*run.model, *restored.model);
        }
      }
    }
  }
}

TEST(LossScales, EachScalerFallsByItsOwnOverflows) {
  const std::vector<int> decreases{0, 1, 2};
  for (const OptLevel level : {OptLevel::O1, OptLevel::O2}) {
    CheckpointsTrained run;
    run.initialize(level, static_cast<int>(decreases.size()));
    const double initial = run.precision->loss_scale();
    for (std::size_t id = 0; id < decreases.size(); ++id) {
      for (int k = 0; k < decreases[id]; ++k) {
        const Tensor x = autograd::affine(random_input({16, 3, 24, 24}, id), 0x1p17, 0.0);
        const Tensor loss = autograd::sum((*run.model)(x));
        run.precision->backward(autograd::affine(loss, 0x1p17, 0.0),
                                {.loss_id = static_cast<int>(id)});
        EXPECT_FALSE(run.precision->step().applied);
      }
    }
    const StateDict state = run.precision->state_dict();
    for (std::size_t id = 0; id < decreases.size(); ++id) {
      const double expected = initial / static_cast<double>(1 << decreases[id]);
      const StateDict& scaler = state.dict(core::str("loss_scaler", id));
      EXPECT_EQ(run.precision->loss_scale(static_cast<int>(id)), expected);
      EXPECT_EQ(scaler.number("loss_scale"), expected);
      EXPECT_EQ(scaler.integer("unskipped"), 0);
    }
  }
}

TEST(SavedState, HoldsNoHalfAndTheLossFalls) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
    manual_seed(2809);
    Net model;
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
    amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = level});
    const Tensor x = random_input({10, 3, 4, 4}, 1), target = random_input({10, 6, 4, 4}, 2);
    double before = std::numeric_limits<double>::infinity();
    for (int step = 0; step < 10; ++step) {
      expect_no_half(model.state_dict());
      expect_no_half(optimizer.state_dict());
      const Tensor loss = autograd::mse_loss(autograd::to(model(x), DType::f32), target);
      precision.backward(loss);
      EXPECT_TRUE(precision.step().applied);
      EXPECT_LT(loss.item(), before) << amp::name(level) << " step " << step;
      before = loss.item();
    }
  }
}

}  // namespace
}  // namespace cairn::conformance
