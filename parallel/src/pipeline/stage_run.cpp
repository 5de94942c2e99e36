#include "pipeline/stage_run.h"

#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"

namespace cairn::parallel {

const Tensor& StageRun::forward(int micro_batch, const Tensor& x, bool sends_back) {
  const core::DefaultDeviceGuard here(stage_.device);
  Ends& own = ends(micro_batch);
  own.input = autograd::to(x, stage_.device);
  if (sends_back) own.input.set_requires_grad(true);
  own.output = stage_.module(own.input);
  return own.output;
}

Tensor StageRun::backward(int micro_batch, const Tensor& dy) {
  const Ends own = std::exchange(ends(micro_batch), {});
  autograd::backward(own.output, dy.defined() ? autograd::to(dy, own.output.device()) : dy);
  const bool is_leaf = own.input.requires_grad() && own.input.grad().defined();
  return is_leaf ? own.input.grad().detach() : Tensor();
}

Tensor MeanLoss::add(int micro_batch, const Tensor& output) {
  const Tensor target = micro_batches_.part(target_, micro_batch);
  const double share = static_cast<double>(target.size(0)) / static_cast<double>(micro_batches_.n);
  const Tensor loss = loss_(output, autograd::to(target, output.device()));
  CAIRN_CHECK(loss.defined() && loss.numel() == 1, "pipeline", "expected a scalar loss, got ",
              loss.defined() ? core::str(loss.shape()) : "an undefined tensor");
  Tensor part = autograd::affine(loss, share, 0.0);
  const autograd::NoGradGuard no_grad;
  total_ = total_.defined() ? autograd::add(total_, part) : part.detach();
  return part;
}

std::string problem_of_batch(const char* name, const Tensor& x) {
  if (x.defined() && x.dims() > 0 && x.size(0) > 0) return "";
  return core::str("expected ", name, " [N, ...] with one sample at least, got ",
                   x.defined() ? core::str(x.shape()) : "an undefined tensor");
}

std::string problem_of_grad_mode() {
  if (autograd::grad_enabled()) return "";
  return "expected gradients to be on, got a step under no_grad (call the pipeline itself to "
         "evaluate)";
}

std::string problem_of_stage(const PipelineStage& stage, std::size_t s) {
  for (const auto& [name, tensor] : stage.module.get().parameters()) {
    if (tensor.device() == stage.device) continue;
    return core::str("expected stage ", s, " on ", stage.device, ", got '", name, "' on ",
                     tensor.device(), " (module.to(device))");
  }
  return "";
}

void check(const std::string& problem) {
  if (!problem.empty()) core::fail("pipeline", problem);
}

void break_gradients(const PipelineStage& stage, const char* error) {
  for (const auto& [name, tensor] : stage.module.get().parameters()) {
    tensor.gradient_slot().mark_broken(error);
  }
}

}  // namespace cairn::parallel
