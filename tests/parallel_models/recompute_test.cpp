// Recomputed activations inside of what trains on several devices and ranks: the bits of the same
// training without, and every hook once.
#include "cairn/checkpointing/recompute.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/planner.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/data_parallel.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/pipeline.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "parallel/ranks.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel::recomputation {
namespace {

using Values = std::vector<std::vector<double>>;
constexpr std::int64_t kWidth = 8;

Tensor batch(std::uint64_t seed) {
  return test::random_tensor({12, kWidth}, DType::f32, core::default_device(), seed);
}

/// Layers, one of them used twice, with a batch norm and dropout; as they are or recomputed, with a
/// segment inside of a segment.
class Layers : public nn::Module {
 public:
  explicit Layers(bool recomputes)
      : recomputes_(recomputes),
        a_(add_module("a", nn::Linear(kWidth, kWidth))),
        norm_(add_module("norm", nn::BatchNorm1d(kWidth))),
        b_(add_module("b", nn::Linear(kWidth, kWidth))) {}
  std::string kind() const override { return "Layers"; }
  Tensor forward(const Tensor& x) override {
    const auto inner = [this](const Tensor& z) { return autograd::gelu((*a_)(z)); };
    const auto outer = [this, inner](const Tensor& z) {
      const Tensor y = recomputes_ ? checkpointing::checkpoint(inner, z) : inner(z);
      return autograd::dropout((*norm_)(inner(y)), 0.2);
    };
    return (*b_)(recomputes_ ? checkpointing::checkpoint(outer, x) : outer(x));
  }

 protected:
  std::shared_ptr<nn::Module> make_like() const override {
    return std::make_shared<Layers>(recomputes_);
  }

 private:
  bool recomputes_;
  std::shared_ptr<nn::Linear> a_;
  std::shared_ptr<nn::BatchNorm1d> norm_;
  std::shared_ptr<nn::Linear> b_;
};

TEST(RecomputeInside, ASynchronisedBatchNormCountsABatchOnce) {
  test::run_threads(2, [](ProcessGroup& group) {
    const auto statistics = [&](bool recomputes) {
      SyncBatchNorm norm(kWidth, group);
      Tensor x = batch(static_cast<std::uint64_t>(group.rank()));
      x.set_requires_grad(true);
      const auto forward = [&](const Tensor& z) { return norm(z); };
      const Tensor y = recomputes ? checkpointing::checkpoint(forward, x) : forward(x);
      autograd::backward(autograd::sum(y * y * y));
      std::vector<std::vector<double>> all{x.grad().to_vector()};
      for (const auto& [name, tensor] : norm.buffers()) all.push_back(tensor.to_vector());
      return all;
    };
    EXPECT_EQ(statistics(true), statistics(false));
  });
}

Values state_of(const nn::Module& model) {
  Values all;
  for (const auto& [name, tensor] : model.parameters()) all.push_back(tensor.to_vector());
  for (const auto& [name, tensor] : model.buffers()) all.push_back(tensor.to_vector());
  return all;
}

Values trained_by_ddp(bool recomputes, int micro_batches) {
  Values result;
  test::run_threads(2, [&](ProcessGroup& group) {
    manual_seed(1);
    Layers model(recomputes);
    DistributedDataParallel ddp(model, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    std::map<std::string, int> fired;
    std::vector<autograd::HookHandle> hooks;
    for (const auto& [name, tensor] : model.parameters()) {
      hooks.push_back(autograd::on_gradient_ready(
          tensor, [&fired, name = name](const Tensor&) { ++fired[name]; }));
    }
    for (int step = 0; step < 3; ++step) {
      fired.clear();
      for (int i = 0; i < micro_batches; ++i) {
        const auto no_sync = ddp.no_sync(i + 1 < micro_batches);
        autograd::backward(
            autograd::mean(autograd::tanh(ddp(batch(100u * step + 10u * i + group.rank())))));
      }
      EXPECT_EQ(fired.size(), 6u);
      for (const auto& [name, count] : fired) EXPECT_EQ(count, micro_batches) << name;
      test::expect_applied(optimizer.step());
    }
    if (group.rank() == 0) result = state_of(model);
  });
  return result;
}

TEST(RecomputeInside, DistributedDataParallelWithAndWithoutAccumulation) {
  for (const int micro_batches : {1, 3}) {
    const Values plain = trained_by_ddp(false, micro_batches);
    EXPECT_FALSE(plain.empty());
    EXPECT_EQ(trained_by_ddp(true, micro_batches), plain) << micro_batches;
  }
}

Values gradients_of(const nn::Module& model) {
  Values all;
  for (const auto& [name, tensor] : model.parameters()) all.push_back(tensor.grad().to_vector());
  return all;
}

TEST(RecomputeInside, DataParallelsThreads) {
  const auto gradients = [](bool recomputes) {
    manual_seed(1);
    Layers model(recomputes);
    DataParallel parallel(model, {{core::DeviceType::cpu, 0}, {core::DeviceType::cpu, 1}}, {});
    autograd::backward(autograd::mean(autograd::tanh(parallel(batch(1)))));
    return gradients_of(model);
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(RecomputeInside, DataParallelsReplicasFollowThePlan) {
  const auto gradients = [](bool planned) {
    manual_seed(1);
    nn::Sequential model;
    for (int i = 0; i < 4; ++i) model.add(Layers(false));
    if (planned) {
      const checkpointing::Schedule schedule{{0, 3, {{0, 1, {}}, {1, 2, {}}, {2, 3, {}}}},
                                             {3, 4, {}}};
      checkpointing::RecomputationPlan({4, checkpointing::Segment()},
                                       std::vector<checkpointing::BlockProfile>(4), schedule, 0)
          .apply(model);
    }
    DataParallel parallel(model, {{core::DeviceType::cpu, 0}, {core::DeviceType::cpu, 1}}, {});
    class Replays : public autograd::ScopedObserver {
     public:
      int count = 0;

     private:
      void on_end(const autograd::OpEvent& event) override {
        count += event.phase == autograd::Phase::recompute ? 1 : 0;
      }
    } replays;
    autograd::backward(autograd::mean(autograd::tanh(parallel(batch(1)))));
    EXPECT_EQ(replays.count > 0, planned);
    return gradients_of(model);
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(RecomputeInside, PipelinesStages) {
  const auto gradients = [](bool recomputes, PipelineSchedule schedule) {
    manual_seed(1);
    Layers first(recomputes), second(recomputes);
    second.to(Device{core::DeviceType::cpu, 1});
    Pipeline pipeline({{first, {core::DeviceType::cpu, 0}}, {second, {core::DeviceType::cpu, 1}}},
                      [](const Tensor& y, const Tensor& t) { return nn::mse_loss(y, t); },
                      {.micro_batches = 3, .schedule = schedule});
    pipeline.train_step(batch(1), batch(2));
    Values all = gradients_of(first);
    for (auto& values : gradients_of(second)) all.push_back(values);
    for (auto& values : state_of(second)) all.push_back(values);
    return all;
  };
  for (const auto schedule :
       {PipelineSchedule::gpipe, PipelineSchedule::one_forward_one_backward}) {
    EXPECT_EQ(gradients(true, schedule), gradients(false, schedule));
  }
}

}  // namespace
}  // namespace cairn::parallel::recomputation
