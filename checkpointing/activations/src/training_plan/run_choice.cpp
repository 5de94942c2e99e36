// How a choice runs the model.
#include <utility>
#include <vector>

#include "cairn/autograd/ops.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/error.h"
#include "cairn/nn/linear.h"
#include "cairn/nn/sequential.h"
#include "plan/schedule_run.h"
#include "training_plan/fused_end.h"

namespace cairn::checkpointing {

nn::Linear* fusable_end(nn::Sequential& model) {
  if (model.size() == 0) return nullptr;
  auto* linear = dynamic_cast<nn::Linear*>(&model.at(model.size() - 1));
  const bool plain =
      linear != nullptr && linear->options().activation == autograd::Activation::none;
  return plain ? linear : nullptr;
}

Segment fused_end(const nn::Linear& linear, const Tensor& target) {
  return [weight = linear.weight(), bias = linear.bias(), target](const Tensor& x) {
    return autograd::linear_cross_entropy(x, weight, bias, target);
  };
}

namespace {

class RunnerGuard {
 public:
  RunnerGuard(nn::Sequential& model, nn::Sequential::Runner runner)
      : model_(model), before_(model.runner()) {
    model_.set_runner(std::move(runner));
  }
  ~RunnerGuard() { model_.set_runner(std::move(before_)); }
  RunnerGuard(const RunnerGuard&) = delete;
  RunnerGuard& operator=(const RunnerGuard&) = delete;

 private:
  nn::Sequential& model_;
  nn::Sequential::Runner before_;
};

}  // namespace

Tensor TrainingChoice::output(nn::Sequential& model, const Tensor& x) const {
  CAIRN_CHECK(!fused_loss, kTrainingPlanner,
              "expected a choice whose loss is not fused with the last module, got ", describe());
  return run(model, x, nullptr);
}

Tensor TrainingChoice::loss(nn::Sequential& model, const Tensor& x, const Tensor& target) const {
  const Tensor y = run(model, x, &target);
  return fused_loss ? y : loss_function(y, target);
}

// The fused end takes the target.
Tensor TrainingChoice::run(nn::Sequential& model, const Tensor& x, const Tensor* target) const {
  CAIRN_CHECK(!schedule.empty() && schedule.back().end == model.size(), kTrainingPlanner,
              "expected the planned Sequential, got one of ", model.size(), " modules");
  CAIRN_CHECK(dimension < x.dims() && x.size(dimension) <= micro_batch, kTrainingPlanner,
              "expected a micro-batch of at most ", micro_batch, " samples along dimension ",
              dimension, ", as this choice counts its memory, got ", x.shape(),
              " (cut the batch: micro_batches of them, then one update)");
  const RunnerGuard guard(model, [&](nn::Sequential& modules, const Tensor& in) {
    std::vector<Segment> parts = modules_of(modules);
    if (fused_loss) {
      nn::Linear* end = fusable_end(modules);
      CAIRN_CHECK(end != nullptr, kTrainingPlanner,
                  "expected the planned Sequential, which ends with a Linear, got another one");
      parts.back() = fused_end(*end, *target);
    }
    return run_schedule(parts, schedule, offload, in);
  });
  return model(x);
}

}  // namespace cairn::checkpointing
