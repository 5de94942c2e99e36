// A model cut into stages, and a batch cut into micro-batches that go through them one behind the
// other: Pipeline has its stages on devices of this process, RankPipeline one on each rank of a
// group.
//
//   parallel::Pipeline pipeline({{encoder, devices[0]}, {decoder, devices[1]}},
//       [](const Tensor& y, const Tensor& t) { return nn::cross_entropy(y, t); },
//       {.micro_batches = 8});
//   Tensor mean = pipeline.train_step(images, labels);  // gradients: the unsplit model's
//   schedule.step(optimizer.step());
//
//   parallel::RankPipeline part({encoder, device}, group, {}, {.micro_batches = 8});  // on rank 0
//   Tensor same = part.train_step(images, {});  // gradients: this stage's; the loss: of all
//
// The calling thread starts all work of a Pipeline, in the order of the schedule, on the devices'
// current streams: GPUs overlap, CPU devices take turns. Each stage adds its micro-batches'
// gradients in one fixed order.
//
// Schedules. gpipe: all forwards, then all backwards; a stage keeps the activations of all m
// micro-batches. one_forward_one_backward (PipeDream-flush): as soon as the last stage has a loss,
// forwards and backwards alternate; stage s of p keeps those of p - s micro-batches at most. With
// forwards and backwards that take one slot each, both leave a stage idle in (p - 1) / (m + p - 1)
// of all slots.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

enum class PipelineSchedule : std::uint8_t { gpipe, one_forward_one_backward };

struct PipelineOptions {
  int micro_batches = 4;  // fewer where the batch is smaller
  PipelineSchedule schedule = PipelineSchedule::one_forward_one_backward;
};

/// A part of the model and the device that it lies on. The module must outlive the pipeline.
struct PipelineStage {
  std::reference_wrapper<nn::Module> module;
  Device device;
};

/// What the last step was made of.
struct PipelineReport {
  int micro_batches = 0;
  int slots = 0;                    // until the last backward was done
  double bubble = 0.0;              // share of all stages' slots without work
  std::vector<int> most_in_flight;  // micro-batches whose activations a stage kept at a time
};

class Pipeline {
 public:
  /// The mean over the samples of its micro-batch, as a scalar.
  using Loss = std::function<Tensor(const Tensor& output, const Tensor& target)>;
  /// Throws InvalidArgument without a stage, a loss or a micro-batch.
  Pipeline(std::vector<PipelineStage> stages, Loss loss, const PipelineOptions& options = {});

  /// Forward and backward of a batch x [N, ...] with target [N, ...], on any devices. Returns the
  /// mean loss over the samples, without a graph, on the last device; gradients are added to the
  /// parameters'. Throws InvalidArgument for an empty batch and for a stage that is not on its
  /// device. Where a stage throws, gradients that some micro-batches have added to are broken, and
  /// the next step refuses them.
  ///
  /// Batch norms see micro-batches, and random numbers are drawn in the schedule's order.
  Tensor train_step(const Tensor& x, const Tensor& target);

  /// Forward of a whole batch through all stages; differentiable.
  Tensor operator()(const Tensor& x) const;

  const PipelineReport& report() const { return report_; }

 private:
  void check_stages() const;
  std::vector<PipelineStage> stages_;
  Loss loss_;
  PipelineOptions options_;
  PipelineReport report_;
};

/// Rank r of the group holds stage r. Activations and gradients travel by send and recv between
/// neighbours; ranks work at the same time. Gradients are, bit for bit, those of a Pipeline of the
/// same stages and options.
///
/// Each rank has an optimizer of its stage's parameters. Shapes and dtypes may differ from stage to
/// stage and from step to step; all devices are CPUs or all are GPUs.
class RankPipeline {
 public:
  /// A collective of the group's ranks. Only the last rank needs a loss. Throws InvalidArgument, on
  /// every rank, without one there, without a micro-batch, for a stage that is not on its device
  /// and for options that differ.
  RankPipeline(PipelineStage stage, ProcessGroup group, Pipeline::Loss loss = {},
               const PipelineOptions& options = {});
  ~RankPipeline();
  RankPipeline(const RankPipeline&) = delete;
  RankPipeline& operator=(const RankPipeline&) = delete;

  /// Forward and backward of a batch, on every rank: x [N, ...] is read on the first, target [N,
  /// ...] on the last, elsewhere they may be undefined. Returns the mean loss over the samples, an
  /// f32 scalar without a graph on this rank's device, on every rank. Throws InvalidArgument, on
  /// every rank, for what is wrong on any of them before work begins: an empty batch, no_grad.
  /// Where a stage throws, its rank breaks the group: the error goes on there, CommunicationError
  /// with its text elsewhere, and the gradients of all ranks are broken.
  Tensor train_step(const Tensor& x, const Tensor& target);

  /// Forward of a whole batch x, on every rank; without a graph. The last rank's output, undefined
  /// elsewhere.
  Tensor operator()(const Tensor& x);

  /// Of all stages' slots, by the schedule.
  const PipelineReport& report() const { return report_; }

 private:
  class Link;
  class Step;
  void agree_on_options() const;
  std::int64_t agree_on_samples(const Tensor& x, const Tensor& target) const;
  void guarded(const std::function<void()>& work);

  PipelineStage stage_;
  ProcessGroup group_;
  Pipeline::Loss loss_;
  PipelineOptions options_;
  std::unique_ptr<Link> before_, after_;  // to the neighbours; none at the ends
  PipelineReport report_;
};

}  // namespace cairn::parallel
