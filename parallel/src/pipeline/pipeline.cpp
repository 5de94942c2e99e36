#include "cairn/parallel/pipeline.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "pipeline/schedule.h"

namespace cairn::parallel {
namespace {

Tensor part_of(const Tensor& x, std::int64_t each, int micro_batch) {
  const std::int64_t begin = each * micro_batch, end = std::min(begin + each, x.size(0));
  return x.alias(x.view().slice(0, begin, end));
}

/// One step: what goes from stage to stage. A stage's graph ends at its input, so each backward is its own.
class Step {
 public:
  Step(const std::vector<PipelineStage>& stages, const Pipeline::Loss& loss, const Tensor& x,
       const Tensor& target, std::int64_t each, int micro_batches)
      : stages_(stages),
        loss_(loss),
        x_(x),
        target_(target),
        each_(each),
        ends_(stages.size(), std::vector<Ends>(static_cast<std::size_t>(micro_batches))) {}

  void run(const PipelineTask& task) { task.backward ? backward(task) : forward(task); }
  const Tensor& mean_loss() const { return total_; }

 private:
  /// What a stage keeps of a micro-batch between its forward and its backward.
  struct Ends {
    Tensor input, output;
    Tensor dy;  // of the output, from the next stage
  };

  Ends& ends(int stage, int micro_batch) {
    return ends_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(micro_batch)];
  }
  bool is_last(int stage) const { return stage + 1 == static_cast<int>(stages_.size()); }

  void forward(const PipelineTask& task) {
    const PipelineStage& stage = stages_[static_cast<std::size_t>(task.stage)];
    const core::DefaultDeviceGuard here(stage.device);
    const bool first = task.stage == 0;
    const Tensor from = first ? part_of(x_, each_, task.micro_batch)
                              : ends(task.stage - 1, task.micro_batch).output.detach();
    Ends& own = ends(task.stage, task.micro_batch);
    own.input = autograd::to(from, stage.device);
    const bool sends_back = !first && ends(task.stage - 1, task.micro_batch).output.requires_grad();
    if (sends_back) own.input.set_requires_grad(true);
    own.output = stage.module(own.input);
    if (is_last(task.stage)) add_loss(task, own);
  }

  /// The micro-batch's share of the mean over the batch.
  void add_loss(const PipelineTask& task, Ends& own) {
    const Tensor target = part_of(target_, each_, task.micro_batch);
    const double share = static_cast<double>(target.size(0)) / static_cast<double>(x_.size(0));
    const Tensor loss = loss_(own.output, autograd::to(target, own.output.device()));
    CAIRN_CHECK(loss.defined() && loss.numel() == 1, "pipeline", "expected a scalar loss, got ",
                loss.defined() ? core::str(loss.shape()) : "an undefined tensor");
    own.output = autograd::affine(loss, share, 0.0);
    const autograd::NoGradGuard no_grad;
    total_ = total_.defined() ? autograd::add(total_, own.output) : own.output.detach();
  }

  void backward(const PipelineTask& task) {
    const Ends own = std::exchange(ends(task.stage, task.micro_batch), {});
    const bool reached = is_last(task.stage) || own.dy.defined();
    if (!reached || !own.output.requires_grad()) return;  // all that is frozen
    autograd::backward(own.output, own.dy);
    if (task.stage == 0 || !own.input.grad().defined()) return;
    Ends& before = ends(task.stage - 1, task.micro_batch);
    before.dy = autograd::to(own.input.grad().detach(), before.output.device());
  }

  const std::vector<PipelineStage>& stages_;
  const Pipeline::Loss& loss_;
  const Tensor &x_, &target_;
  std::int64_t each_;
  std::vector<std::vector<Ends>> ends_;  // [stage][micro-batch]
  Tensor total_;
};

void break_gradients(const std::vector<PipelineStage>& stages, const char* error) {
  for (const PipelineStage& stage : stages) {
    for (const auto& [name, tensor] : stage.module.get().parameters()) {
      tensor.gradient_slot().mark_broken(error);
    }
  }
}

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
    for (const auto& [name, tensor] : stages_[s].module.get().parameters()) {
      CAIRN_CHECK(tensor.device() == stages_[s].device, "pipeline", "expected stage ", s, " on ",
                  stages_[s].device, ", got '", name, "' on ", tensor.device(),
                  " (module.to(device))");
    }
  }
}

Tensor Pipeline::train_step(const Tensor& x, const Tensor& target) {
  CAIRN_CHECK(x.defined() && x.dims() > 0 && x.size(0) > 0, "pipeline", "expected x [N, ...] with ",
              "one sample at least, got ",
              x.defined() ? core::str(x.shape()) : "an undefined tensor");
  CAIRN_CHECK(target.defined() && target.dims() > 0 && target.size(0) == x.size(0), "pipeline",
              "expected a target [", x.size(0), ", ...], got ",
              target.defined() ? core::str(target.shape()) : "an undefined tensor");
  CAIRN_CHECK(autograd::grad_enabled(), "pipeline", "expected gradients to be on, got a step ",
              "under no_grad (call the pipeline itself to evaluate)");
  check_stages();
  const std::int64_t n = x.size(0),
                     each = (n + options_.micro_batches - 1) / options_.micro_batches;
  const int micro_batches = static_cast<int>((n + each - 1) / each);
  const int stages = static_cast<int>(stages_.size());
  const PipelinePlan plan = plan_pipeline(stages, micro_batches, options_.schedule);
  Step step(stages_, loss_, x, target, each, micro_batches);
  try {
    for (const std::vector<PipelineTask>& slot : plan) {
      for (const PipelineTask& task : slot) step.run(task);
    }
  } catch (const std::exception& error) {
    break_gradients(stages_, error.what());
    throw;
  }
  report_ = report_of(plan, stages, micro_batches);
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
