// Whose gradient was not finite, although after the reduction every rank's is.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/gradients/stash.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optimizer.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "ranks.h"

namespace cairn::parallel {
namespace {

using test::run_ranks;
using test::run_threads;
using Found = std::vector<optim::NonFinite>;

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

/// sum(a * ca) + sum(b * cb) + sum(c * cc): the gradients are the factors.
class Weights : public nn::Module {
 public:
  explicit Weights(DType dtype) {
    for (const char* name : {"a", "b", "c"}) {
      add_parameter(name, Tensor::full({300}, 1.0, dtype));
      factors.emplace_back(300, 0.5);
    }
  }
  std::string kind() const override { return "Weights"; }
  Tensor forward(const Tensor&) override {
    Tensor loss;
    std::size_t i = 0;
    for (const auto& [name, weight] : parameters()) {
      const Tensor factor = Tensor::from(factors[i++], {300}, weight.dtype());
      const Tensor term = autograd::sum(weight * factor);
      loss = loss ? loss + term : term;
    }
    return loss;
  }
  std::vector<std::vector<double>> factors;

 protected:
  std::shared_ptr<nn::Module> make_like() const override {
    return std::make_shared<Weights>(DType::f32);
  }
};

void expect_found(const Found& actual, const Found& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].parameter, expected[i].parameter);
    EXPECT_EQ(actual[i].inf, expected[i].inf);
    EXPECT_EQ(actual[i].nan, expected[i].nan);
  }
}

void backward(DistributedDataParallel& ddp) {
  autograd::backward(ddp(Tensor::zeros({1})));
}

Found local_nonfinite(DistributedDataParallel& ddp) {
  return ddp.world().take_local_nonfinite().value_or(Found{});
}

std::vector<Tensor> weights_of(Weights& model) {
  std::vector<Tensor> weights;
  for (const auto& [name, weight] : model.parameters()) weights.push_back(weight);
  return weights;
}

DistributedOptions bucket_each() {
  return {.first_bucket_bytes = 1, .bucket_bytes = 1};
}

void check_attribution(ProcessGroup& group) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (bool small : {false, true}) {
      Weights model(dtype);
      DistributedDataParallel ddp(model, group, small ? bucket_each() : DistributedOptions{});
      const int last = group.world_size() - 1;
      backward(ddp);
      expect_found(local_nonfinite(ddp), {});

      model.clear_grad();
      if (group.rank() == last) {
        model.factors[1][0] = kInf, model.factors[1][299] = kNan, model.factors[2][7] = -kInf;
      }
      if (group.rank() == 0) model.factors[0][5] = kNan;
      backward(ddp);
      for (const auto& [name, weight] : model.parameters()) {  // everybody has them by now
        EXPECT_GT(kernels::check_tensors({weight.grad()}).read()[0].nonfinite, 0) << name;
      }
      const Found found = local_nonfinite(ddp);
      if (group.rank() == last) {
        expect_found(found, {{"b", 1, 1}, {"c", 1, 0}});
      } else if (group.rank() == 0) {
        expect_found(found, {{"a", 0, 1}});
      } else {
        expect_found(found, {});
      }
      expect_found(local_nonfinite(ddp), {});  // told once
    }
  }
}

TEST(LocalNonfinite, BelongsToTheRankThatMadeItInProcesses) {
  run_ranks(2, check_attribution);
}
TEST(LocalNonfinite, BelongsToTheRankThatMadeItInThreads) {
  run_threads(2, check_attribution);
  run_threads(4, check_attribution);
}

TEST(LocalNonfinite, CountsEveryBackwardThatTheStepUses) {
  run_threads(2, [](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedDataParallel ddp(model, group);
    const auto with = [&](std::size_t parameter, double value) {
      model.factors[parameter][3] = group.rank() == 1 ? value : 0.5;
      backward(ddp);
      model.factors[parameter][3] = 0.5;
    };
    with(1, kInf);
    model.clear_grad();  // and so does not use this one
    for (const auto& [parameter, value] : {std::pair(0, kInf), {2, kNan}, {0, kInf}}) {
      with(static_cast<std::size_t>(parameter), value);
      gradients::stash(weights_of(model));  // the losses of one step
    }
    const Found expected = {{"a", 2, 0}, {"c", 0, 1}};
    expect_found(local_nonfinite(ddp), group.rank() == 1 ? expected : Found{});
  });
}

TEST(LocalNonfinite, GoesByNameWhereParametersAreFrozenSince) {
  run_threads(2, [](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedDataParallel ddp(model, group);
    model.factors[2][3] = kInf;
    backward(ddp);
    gradients::stash(weights_of(model));
    model.factors[2][3] = 0.5;
    Tensor(model.parameters()[1].tensor).set_requires_grad(false);
    backward(ddp);
    expect_found(local_nonfinite(ddp), {{"c", 1, 0}});
  });
}

TEST(LocalNonfinite, IsForgottenWithGradientsThatALoadDrops) {
  run_threads(2, [](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedDataParallel ddp(model, group);
    model.factors[2][3] = kInf;
    backward(ddp);
    ddp.load_state_dict(ddp.state_dict());
    expect_found(local_nonfinite(ddp), {});
  });
}

TEST(LocalNonfinite, SeesWhatMicroBatchesAddedUp) {
  run_threads(2, [](ProcessGroup& group) {
    Weights model(DType::f16);
    DistributedDataParallel ddp(model, group);
    // Sums in f16, as without master weights: 40000 is finite, twice that is not.
    optim::GradientArena::of(model.parameters()[0].tensor)->accumulate_in_f32(false);
    if (group.rank() == 1) model.factors[1].assign(300, 40000.0);
    for (int micro = 0; micro < 2; ++micro) {
      const auto guard = ddp.no_sync(micro == 0);
      backward(ddp);
    }
    expect_found(local_nonfinite(ddp), group.rank() == 1 ? Found{{"b", 300, 0}} : Found{});
  });
}

TEST(LocalNonfinite, ASumThatOverflowsIsNobodysOwn) {
  run_threads(2, [](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedDataParallel ddp(model, group);
    model.factors[0].assign(300, std::numeric_limits<float>::max());
    backward(ddp);
    EXPECT_EQ(kernels::check_tensors({model.parameters()[0].tensor.grad()}).read()[0].nonfinite,
              300);
    expect_found(local_nonfinite(ddp), {});
  });
}

TEST(LocalNonfinite, CostsAReadOnlyWhereItIsAskedFor) {
  run_threads(1, [](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedDataParallel ddp(model, group);
    const std::int64_t before = kernels::host_reads();
    backward(ddp);
    EXPECT_EQ(kernels::host_reads(), before);
    expect_found(local_nonfinite(ddp), {});  // in a group of one there is nothing to tell apart
  });
  std::int64_t before = 0;
  run_threads(2, [&](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedDataParallel ddp(model, group, bucket_each());
    backward(ddp);  // the first one compares batches
    local_nonfinite(ddp);
    group.barrier();
    if (group.rank() == 0) before = kernels::host_reads();
    group.barrier();
    backward(ddp);
    group.barrier();
    EXPECT_EQ(kernels::host_reads(), before);
    group.barrier();
    local_nonfinite(ddp);
    group.barrier();
    EXPECT_EQ(kernels::host_reads(), before + 2);  // one a rank
  });
}

void check_with_amp(ProcessGroup& group) {
  const int guilty = group.world_size() - 1;
  Weights model(DType::f32);
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
  DistributedDataParallel ddp(model, group);
  amp::Options options;
  options.opt_level = amp::OptLevel::O2;
  options.scaler.init_scale = 1024;
  options.world = ddp.world();
  amp::Amp precision = amp::initialize(model, optimizer, options);
  const auto step = [&](double factor) {
    if (group.rank() == guilty) model.factors[1][0] = factor;
    precision.backward(ddp(Tensor::zeros({1})));
    return precision.step();
  };
  const optim::StepResult skipped = step(kInf);
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.reason, core::str("inf in the gradient of b (1 element) on rank ", guilty,
                                      "; loss scale 1024 -> 512"));
  ASSERT_EQ(precision.overflows().back().culprits.size(), 1u);
  EXPECT_EQ(precision.overflows().back().culprits[0].rank, guilty);
  EXPECT_TRUE(step(0.5).applied);
}

TEST(LocalNonfinite, AmpNamesTheRankInProcesses) {
  run_ranks(2, check_with_amp);
}
TEST(LocalNonfinite, AmpNamesTheRankInThreads) {
  run_threads(4, check_with_amp);
}

TEST(LocalNonfinite, CanBeTurnedOff) {
  run_threads(2, [](ProcessGroup& group) {
    Weights model(DType::f32);
    DistributedOptions options;
    options.check_local_gradients = false;
    DistributedDataParallel ddp(model, group, options);
    model.factors[0][0] = kInf;
    backward(ddp);
    expect_found(local_nonfinite(ddp), {});
  });
}

}  // namespace
}  // namespace cairn::parallel
