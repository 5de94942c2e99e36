#include "support/trainer.h"

#include <algorithm>
#include <csignal>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/schedule.h"
#include "cairn/parallel/distributed.h"
#include "support/digits_data.h"

namespace support {

using namespace cairn;

double accuracy(const Tensor& logits, const Tensor& labels) {
  autograd::NoGradGuard no_grad;
  const Tensor right = autograd::compare(kernels::BinaryOp::eq, autograd::argmax(logits), labels);
  return autograd::mean(autograd::to(right, DType::f32)).item();
}

/// What one run is made of, in the order in which it is built.
struct Trainer::Parts {
  explicit Parts(Trainer& t)
      : ddp(t.task_.model, t.group_),
        world(ddp.world()),
        optimizer(t.flags_.make_optimizer(t.task_.model.parameters())),
        precision(amp::initialize(t.task_.model, *optimizer, t.flags_.amp_options(world))),
        sampler(t.task_.train.size(), {.world = world, .seed = t.flags_.seed}),
        loader(t.task_.train, sampler,
               {.batch_size = t.flags_.batch_size,
                .drop_last = true,
                .device = t.device_,
                .normalize = t.task_.normalize,
                .normalize_on_device = normalize}),
        total_steps(t.total_steps(loader)),
        schedule(*optimizer,
                 t.flags_.schedule == "cosine" ? optim::cosine(total_steps) : optim::constant()),
        accumulation({.steps = t.flags_.accumulate, .world = world}),
        state({{"model", t.task_.model},
               {"optimizer", *optimizer},
               {"amp", precision},
               {"schedule", schedule},
               {"accumulation", accumulation},
               {"sampler", sampler},
               {"ddp", ddp}},
              world) {}

  parallel::DistributedDataParallel ddp;
  World world;
  std::unique_ptr<optim::Optimizer> optimizer;
  amp::Amp precision;
  data::DistributedSampler sampler;
  data::DataLoader loader;
  std::int64_t total_steps;
  optim::Schedule schedule;
  optim::Accumulation accumulation;
  checkpointing::TrainingState state;
};

Trainer::Trainer(const Flags& flags, Task task)
    : flags_(flags),
      task_(std::move(task)),
      group_(parallel::ProcessGroup::from_environment()),
      device_(group_.device(flags.device)) {
  task_.model.to(device_);
}

std::int64_t Trainer::total_steps(const data::DataLoader& loader) const {
  CAIRN_CHECK(loader.batches_per_epoch() > 0, "train",
              "expected at least one batch per process and epoch, got ", task_.train.size(),
              " samples for ", group_.world_size(), " x ", flags_.batch_size,
              " (lower --batch-size)");
  if (flags_.steps > 0) return flags_.steps;
  return std::max<std::int64_t>(1, flags_.epochs * loader.batches_per_epoch() / flags_.accumulate);
}

void Trainer::run() {
  Parts parts(*this);
  total_steps_ = parts.total_steps;
  if (!flags_.checkpoint_dir.empty()) parts.state.save_on_signal(SIGTERM, flags_.checkpoint_dir);
  step_ = resume(parts);
  reporter_ = std::make_unique<Reporter>(Reporter::Options{.active = group_.rank() == 0,
                                                           .metrics_path = flags_.metrics,
                                                           .unit = task_.unit,
                                                           .first_step = step_,
                                                           .total_steps = total_steps_,
                                                           .accuracy = task_.accuracy});
  reporter_->note(core::str(task_.description, "; ", flags_.opt_level, " ", flags_.half_dtype, "; ",
                            group_.world_size(), " process(es) on ", device_,
                            step_ > 0 ? core::str("; resumed at step ", step_) : ""));
  while (step_ < total_steps_) {
    for (const data::Batch& batch : parts.loader) {
      micro_batch(parts, batch);
      if (step_ == total_steps_) break;
    }
  }
  parts.ddp.sync_buffers();  // one set of running statistics for the evaluation
}

/// The step to go on from: 0, or that of the checkpoint which --resume and --checkpoint-dir name.
std::int64_t Trainer::resume(Parts& parts) {
  if (flags_.resume == "never" || (flags_.resume == "auto" && flags_.checkpoint_dir.empty()))
    return 0;
  if (flags_.resume != "auto") return parts.state.resume(flags_.resume).step;
  const auto found = parts.state.resume_latest(flags_.checkpoint_dir);
  return found ? found->step : 0;
}

void Trainer::micro_batch(Parts& parts, const data::Batch& batch) {
  const auto micro = parts.accumulation.begin(batch.size());
  const Tensor y = parts.ddp(batch.inputs);
  const Tensor loss = nn::cross_entropy(y, batch.labels);
  parts.precision.backward(loss, {.weight = micro.weight()});
  loss_sum_ += loss.item();
  if (task_.accuracy) accuracy_sum_ += accuracy(y, batch.labels);
  if (micro.last()) optimizer_step(parts);
}

void Trainer::optimizer_step(Parts& parts) {
  const double lr = parts.optimizer->lr();
  const optim::StepResult result =
      parts.precision.step({.gradient_scale = parts.accumulation.finish()});
  parts.schedule.step(result);
  ++step_;
  if (!result.applied) reporter_->note(core::str("step ", step_, " skipped: ", result.reason));
  const std::int64_t samples =
      std::int64_t{flags_.batch_size} * flags_.accumulate * group_.world_size();
  reporter_->step({.step = step_,
                   .loss = loss_sum_ / flags_.accumulate,
                   .accuracy = accuracy_sum_ / flags_.accumulate,
                   .lr = lr,
                   .loss_scale = parts.precision.loss_scale(),
                   .units = samples * task_.units_per_sample,
                   .memory_bytes = core::memory_stats(device_).peak_total});
  loss_sum_ = accuracy_sum_ = 0;
  if (flags_.checkpoint_dir.empty()) return;
  if (step_ % flags_.save_every == 0 || step_ == total_steps_)
    parts.state.save(flags_.checkpoint_dir, step_);
  parts.state.end_on_signal(step_);
}

}  // namespace support
