// Pipelines against the same model in one piece.
#include "cairn/parallel/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using test::expect_close;
using test::random_tensor;
using testing::HasSubstr;
using Values = std::vector<double>;

constexpr std::int64_t kWidth = 8;
constexpr PipelineSchedule kSchedules[] = {PipelineSchedule::gpipe,
                                           PipelineSchedule::one_forward_one_backward};

Device pipeline_cpu(int i) {
  return {core::DeviceType::cpu, i};
}

/// Four layers, as one model and as stages of it.
struct Layers {
  explicit Layers(int stages) {
    manual_seed(4);
    for (int i = 0; i < 4; ++i) {
      auto layer = std::make_shared<nn::Sequential>(nn::Linear(kWidth, kWidth), nn::Tanh());
      const int stage = i * stages / 4;
      if (i == 0 || stage != (i - 1) * stages / 4) {
        modules.push_back(std::make_shared<nn::Sequential>());
      }
      modules.back()->add(layer);
    }
    for (std::size_t s = 0; s < modules.size(); ++s) {
      modules[s]->to(pipeline_cpu(static_cast<int>(s)));
      list.push_back({*modules[s], pipeline_cpu(static_cast<int>(s))});
    }
  }
  NamedTensors parameters() const {
    NamedTensors all;
    for (std::size_t s = 0; s < modules.size(); ++s) {
      for (const auto& [name, tensor] : modules[s]->parameters()) {
        all.push_back({core::str("stage", s, ".", name), tensor});
      }
    }
    return all;
  }
  Values gradients() const {
    Values all;
    for (const auto& [name, tensor] : parameters()) {
      if (!tensor.grad().defined()) continue;
      const Values values = tensor.grad().to_vector();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  std::vector<std::shared_ptr<nn::Sequential>> modules;
  std::vector<PipelineStage> list;
};

Tensor batch(std::int64_t n, std::uint64_t seed) {
  return random_tensor({n, kWidth}, DType::f32, pipeline_cpu(0), seed);
}

Tensor loss_of(const Tensor& y, const Tensor& t) {
  return nn::mse_loss(y, t);
}

TEST(Pipeline, GradientsAndLossAreTheUnsplitModels) {
  for (const PipelineSchedule schedule : kSchedules) {
    for (const int stages : {1, 2, 4}) {
      for (const int micro_batches : {1, 3, 4, 9}) {
        const std::string what = core::str(stages, " stages, ", micro_batches, " micro-batches");
        Layers whole(1), cut(stages);
        const Tensor loss = loss_of((*whole.modules[0])(batch(7, 1)), batch(7, 2));
        autograd::backward(loss);
        Pipeline pipeline(cut.list, loss_of,
                          {.micro_batches = micro_batches, .schedule = schedule});
        const Tensor mean = pipeline.train_step(batch(7, 1), batch(7, 2));
        EXPECT_EQ(mean.device(), pipeline_cpu(stages - 1));
        EXPECT_FALSE(mean.requires_grad());
        EXPECT_NEAR(mean.item(), loss.item(), 1e-6) << what;
        expect_close(cut.gradients(), whole.gradients(), 1e-5, 1e-7, what);
        expect_close(pipeline(batch(7, 1)), (*whole.modules[0])(batch(7, 1)).to_vector(), 1e-6,
                     1e-6, what + " forward");
      }
    }
  }
}

TEST(Pipeline, BubbleIsThatOfTheFormula) {
  for (const PipelineSchedule schedule : kSchedules) {
    for (const int p : {1, 2, 4}) {
      for (const int m : {1, 2, 4, 8, 16}) {
        Layers cut(p);
        Pipeline pipeline(cut.list, loss_of, {.micro_batches = m, .schedule = schedule});
        pipeline.train_step(batch(16, 1), batch(16, 2));
        const PipelineReport& report = pipeline.report();
        EXPECT_EQ(report.micro_batches, m);
        EXPECT_EQ(report.slots, 2 * (m + p - 1)) << p << " " << m;
        EXPECT_NEAR(report.bubble, (p - 1.0) / (m + p - 1.0), 1e-12) << p << " " << m;
        for (int s = 0; s < p; ++s) {
          const int most = schedule == PipelineSchedule::gpipe ? m : std::min(m, p - s);
          EXPECT_EQ(report.most_in_flight[static_cast<std::size_t>(s)], most);
        }
      }
    }
  }
}

// What the schedules differ in: the first stage's activations.
TEST(Pipeline, OneForwardOneBackwardKeepsFewerActivations) {
  const auto peak = [](PipelineSchedule schedule) {
    Layers cut(2);
    Pipeline pipeline(cut.list, loss_of, {.micro_batches = 16, .schedule = schedule});
    const Tensor x = batch(16 * 256, 1), t = batch(16 * 256, 2);
    pipeline.train_step(x, t);
    core::reset_peak_memory(pipeline_cpu(0));
    pipeline.train_step(x, t);
    return core::memory_stats(pipeline_cpu(0)).peak_of(core::MemoryCategory::activations);
  };
  EXPECT_LT(3 * peak(kSchedules[1]), peak(kSchedules[0]));
}

TEST(Pipeline, TrainsAndAccumulates) {
  Layers whole(1), cut(4);
  optim::FusedSGD one(whole.parameters(), {.lr = 0.5}), many(cut.parameters(), {.lr = 0.5});
  Pipeline pipeline(cut.list, loss_of, {.micro_batches = 3});
  Values expected, got;
  for (std::uint64_t step = 0; step < 4; ++step) {
    expected.push_back(0), got.push_back(0);
    for (const std::uint64_t half : {0, 1}) {
      const Tensor x = batch(6, 2 * step + half), t = batch(6, 100 + half);
      const Tensor loss = loss_of((*whole.modules[0])(x), t);
      autograd::backward(loss);
      expected.back() += loss.item();
      got.back() += pipeline.train_step(x, t).item();
    }
    test::expect_applied(one.step());
    test::expect_applied(many.step());
  }
  expect_close(got, expected, 1e-5, 1e-6);
}

TEST(Pipeline, FrozenStagesSendNothingBack) {
  Layers whole(1), cut(4);
  for (Layers* layers : {&whole, &cut}) {
    for (std::size_t i = 0; i < 4; ++i) layers->parameters()[i].tensor.set_requires_grad(false);
  }
  autograd::backward(loss_of((*whole.modules[0])(batch(8, 1)), batch(8, 2)));
  Pipeline pipeline(cut.list, loss_of);
  pipeline.train_step(batch(8, 1), batch(8, 2));
  expect_close(cut.gradients(), whole.gradients(), 1e-5, 1e-7);
}

template <class E = core::InvalidArgument, class F>
std::string pipeline_error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(Pipeline, AFailedStepLeavesNoGradientToStepWith) {
  Layers cut(2);
  optim::FusedSGD sgd(cut.parameters(), {.lr = 0.5});
  int calls = 0;
  Pipeline pipeline(cut.list, [&](const Tensor& y, const Tensor& t) {
    if (++calls == 3) core::fail("loss", "expected luck, got none");
    return loss_of(y, t);
  });
  EXPECT_THAT(pipeline_error_of([&] { pipeline.train_step(batch(8, 1), batch(8, 2)); }),
              HasSubstr("expected luck"));
  EXPECT_THAT(pipeline_error_of<core::Error>([&] { (void)sgd.step(); }),
              HasSubstr("expected luck"));
  sgd.clear_grad();
  pipeline.train_step(batch(8, 1), batch(8, 2));
  EXPECT_TRUE(sgd.step().applied);
}

TEST(Pipeline, WrongInputIsNamed) {
  Layers cut(2);
  EXPECT_THAT(pipeline_error_of([&] { Pipeline({}, loss_of); }), HasSubstr("at least one stage"));
  EXPECT_THAT(pipeline_error_of([&] { Pipeline(cut.list, nullptr); }),
              HasSubstr("a loss function"));
  EXPECT_THAT(pipeline_error_of([&] { Pipeline(cut.list, loss_of, {.micro_batches = 0}); }),
              HasSubstr("at least one micro-batch, got 0"));
  EXPECT_THAT(pipeline_error_of([&] {
                Pipeline({{*cut.modules[0], pipeline_cpu(1)}}, loss_of);
              }),
              HasSubstr("expected stage 0 on cpu:1, got '0.0.weight' on cpu:0"));
  Pipeline pipeline(cut.list, loss_of);
  EXPECT_THAT(pipeline_error_of([&] { pipeline.train_step(batch(0, 1), batch(0, 2)); }),
              HasSubstr("one sample at least, got [0, 8]"));
  EXPECT_THAT(pipeline_error_of([&] { pipeline.train_step(batch(4, 1), batch(3, 2)); }),
              HasSubstr("expected a target [4, ...], got [3, 8]"));
  Pipeline many(cut.list, [](const Tensor& y, const Tensor&) { return y; });
  EXPECT_THAT(pipeline_error_of([&] { many.train_step(batch(4, 1), batch(4, 2)); }),
              HasSubstr("a scalar loss, got [1, 8]"));
  const autograd::NoGradGuard no_grad;
  EXPECT_THAT(pipeline_error_of([&] { pipeline.train_step(batch(4, 1), batch(4, 2)); }),
              HasSubstr("under no_grad"));
}

}  // namespace
}  // namespace cairn::parallel
