#include "cairn/parallel/pipeline.h"

#include <exception>
#include <utility>

#include "cairn/autograd/ops.h"
#include "pipeline/schedule.h"
#include "pipeline/stage_run.h"

namespace cairn::parallel {
namespace {

/// One step: what goes from stage to stage.
class Step {
 public:
  Step(const std::vector<PipelineStage>& stages, const Pipeline::Loss& loss, const Tensor& x,
       const Tensor& target, const MicroBatches& micro_batches)
      : x_(x), micro_batches_(micro_batches), loss_(loss, target, micro_batches) {
    for (const PipelineStage& stage : stages) runs_.emplace_back(stage, micro_batches.count);
    between_.assign(stages.size(),
                    std::vector<Tensor>(static_cast<std::size_t>(micro_batches.count)));
  }

  void run(const PipelineTask& task) { task.backward ? backward(task) : forward(task); }
  const Tensor& mean_loss() const { return loss_.mean(); }

 private:
  /// What has left a stage: forward its output, later the gradient of it.
  Tensor& left(int stage, int micro_batch) {
    return between_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(micro_batch)];
  }
  StageRun& run_of(int stage) { return runs_[static_cast<std::size_t>(stage)]; }
  bool is_last(int stage) const { return stage + 1 == static_cast<int>(runs_.size()); }

  void forward(const PipelineTask& task) {
    const auto [stage, m, backward] = task;
    const Tensor before = stage > 0 ? std::exchange(left(stage - 1, m), {}) : Tensor();
    const Tensor x = stage > 0 ? before.detach() : micro_batches_.part(x_, m);
    const bool sends_back = stage > 0 && before.requires_grad();
    const Tensor output = run_of(stage).forward(m, x, sends_back);
    if (!is_last(stage)) {
      left(stage, m) = output;
    } else {
      run_of(stage).replace_output(m, loss_.add(m, output));
    }
  }

  void backward(const PipelineTask& task) {
    const auto [stage, m, backward] = task;
    const Tensor dy = std::exchange(left(stage, m), {});
    const bool reached = is_last(stage) || dy.defined();
    if (!reached || !run_of(stage).needs_gradient(m)) return run_of(stage).drop(m);  // frozen
    const Tensor dx = run_of(stage).backward(m, dy);
    if (stage > 0 && dx.defined()) left(stage - 1, m) = dx;
  }

  const Tensor& x_;
  const MicroBatches& micro_batches_;
  MeanLoss loss_;
  std::vector<StageRun> runs_;
  std::vector<std::vector<Tensor>> between_;  // [stage][micro-batch]
};

}  // namespace

Pipeline::Pipeline(std::vector<PipelineStage> stages, Loss loss, const PipelineOptions& options)
    : stages_(std::move(stages)), loss_(std::move(loss)), options_(options) {
  CAIRN_CHECK(!stages_.empty(), "pipeline", "expected at least one stage, got none");
  CAIRN_CHECK(loss_, "pipeline", "expected a loss function, got none");
  CAIRN_CHECK(options_.micro_batches > 0, "pipeline", "expected at least one micro-batch, got ",
              options_.micro_batches);
  check_stages();
}

void Pipeline::check_stages() const {
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    core::check_exists(stages_[s].device);
    check(problem_of_stage(stages_[s], s));
  }
}

Tensor Pipeline::train_step(const Tensor& x, const Tensor& target) {
  check(problem_of_batch("x", x));
  CAIRN_CHECK(target.defined() && target.dims() > 0 && target.size(0) == x.size(0), "pipeline",
              "expected a target [", x.size(0), ", ...], got ",
              target.defined() ? core::str(target.shape()) : "an undefined tensor");
  check(problem_of_grad_mode());
  check_stages();
  const MicroBatches micro_batches(x.size(0), options_.micro_batches);
  const int stages = static_cast<int>(stages_.size());
  const PipelinePlan plan = plan_pipeline(stages, micro_batches.count, options_.schedule);
  Step step(stages_, loss_, x, target, micro_batches);
  try {
    for (const std::vector<PipelineTask>& slot : plan) {
      for (const PipelineTask& task : slot) step.run(task);
    }
  } catch (const std::exception& error) {
    for (const PipelineStage& stage : stages_) break_gradients(stage, error.what());
    throw;
  }
  report_ = report_of(plan, stages, micro_batches.count);
  return step.mean_loss();
}

Tensor Pipeline::operator()(const Tensor& x) const {
  Tensor y = x;
  for (const PipelineStage& stage : stages_) {
    const core::DefaultDeviceGuard here(stage.device);
    y = stage.module(autograd::to(y, stage.device));
  }
  return y;
}

}  // namespace cairn::parallel
