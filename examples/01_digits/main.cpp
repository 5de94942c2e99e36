// digits: the tutorials' ConvNet on drawn or real handwritten digits, in mixed precision, on one or
// many processes, resumable bit for bit.
//
//   digits                                            drawn digits, O2, one process
//   cairn-run --nproc-per-node 2 digits --accumulate 2 --checkpoint-dir runs/digits
//   digits --data MNIST_FOLDER --opt-level O0
#include <csignal>

#include "cairn/amp/amp.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/schedule.h"
#include "cairn/parallel/distributed.h"

#include "picture.h"
#include "support/accuracy.h"
#include "support/conv_net.h"
#include "support/digits_data.h"
#include "support/flags.h"
#include "support/normalize.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags : support::Flags {
  support::DigitsFlags data;
  std::string picture;
  int slow_rank = -1;
};

const data::Normalize kNormalize{.mean = 0.1307, .deviation = 0.3081};  // MNIST's own

data::LoaderOptions loader_options(std::int64_t batch_size, Device device) {
  return {.batch_size = batch_size,
          .device = device,
          .normalize = kNormalize,
          .normalize_on_device = support::normalize};
}

/// What a machine a third as fast would take, for scripts/four_ranks.
void take_longer(nn::Module& model, const Tensor& inputs) {
  const autograd::NoGradGuard no_grad;
  for (int i = 0; i < 6; ++i) model(inputs);
}

int train(const Flags& flags, const parallel::ProcessGroup& group) {
  const support::Digits images = support::load_digits(flags.data, flags.seed);
  manual_seed(flags.seed);
  nn::Sequential model = support::conv_net();
  const Device device = group.device(flags.device);
  model.to(device);

  const std::unique_ptr<parallel::DistributedDataParallel> ddp = flags.data_parallel(model, group);
  const World world = ddp->world();
  const std::shared_ptr<optim::Optimizer> optimizer = flags.make_optimizer(model.parameters());
  amp::Amp precision = amp::initialize(model, *optimizer, flags.amp_options(world));

  data::DistributedSampler sampler(images.train->size(), {.world = world, .seed = flags.seed});
  data::LoaderOptions options = loader_options(flags.batch_size, device);
  options.drop_last = true;
  data::DataLoader loader(*images.train, sampler, options);
  const std::int64_t total_steps = flags.total_steps(loader);
  optim::Schedule schedule(*optimizer, flags.learning_rate_curve(total_steps));
  optim::Accumulation accumulation({.steps = flags.accumulate, .world = world});

  checkpointing::TrainingState state({{"model", model},
                                      {"optimizer", *optimizer},
                                      {"amp", precision},
                                      {"schedule", schedule},
                                      {"accumulation", accumulation},
                                      {"sampler", sampler},
                                      {"ddp", *ddp}},
                                     world);
  if (!flags.checkpoint_dir.empty()) state.save_on_signal(SIGTERM, flags.checkpoint_dir);
  std::int64_t step = flags.resume(state);
  support::Reporter reporter(flags, {.world = world,
                                     .device = device,
                                     .description = core::str(images.description, "; ",
                                                              flags.describe(world, device, step)),
                                     .first_step = step,
                                     .total_steps = total_steps});
  const std::int64_t images_per_step =
      std::int64_t{flags.batch_size} * flags.accumulate * world.size;

  observe::Span part(reporter.run(), "data");
  while (step < total_steps) {
    for (const data::Batch& batch : loader) {
      part.next("forward");
      const optim::MicroBatch micro = accumulation.begin(batch.size());
      const Tensor logits = (*ddp)(batch.inputs);
      if (world.rank == flags.slow_rank) take_longer(model, batch.inputs);
      const Tensor loss = nn::cross_entropy(logits, batch.labels);
      part.next("backward");
      precision.backward(loss, {.weight = micro.weight()});
      reporter.micro_batch(loss.item(), support::accuracy(logits, batch.labels));
      part.next(micro.last() ? "update" : "data");
      if (!micro.last()) continue;
      reporter.histograms(model);

      const double lr = optimizer->lr();
      const optim::StepResult result = precision.step({.gradient_scale = accumulation.finish()});
      schedule.step(result);
      ++step;
      part.next("save");
      reporter.step({.step = step,
                     .lr = lr,
                     .loss_scale = precision.loss_scale(),
                     .units = images_per_step,
                     .memory_bytes = core::memory_stats(device).peak_total,
                     .result = result});
      if (flags.save_due(step, total_steps)) {
        state.save(flags.checkpoint_dir, step);
        reporter.saved(step);
      }
      state.end_on_signal(step);
      part.next("data");
      if (step == total_steps) break;
    }
  }

  ddp->sync_buffers();                          // one set of running statistics for the evaluation
  const auto whole = ddp->gather_parameters();  // each process evaluates by itself
  const double test =
      support::test_accuracy(model, *images.test, world, loader_options(250, device));
  if (world.rank == 0 && !flags.picture.empty()) {
    digits::save_picture(flags.picture, model, *images.test, kNormalize, device);
  }
  reporter.finish({{"test_accuracy", test},
                   {"steps", static_cast<double>(step)},
                   {"images_per_second", reporter.per_second()}},
                  {{"peak memory", support::human_bytes(core::memory_stats(device).peak_total)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains the tutorials' ConvNet on drawn or real handwritten digits", "digits");
  Flags flags;
  flags.add_to(app);
  flags.add_shard_to(app);
  flags.data.add_to(app);
  app.add_option("--picture", flags.picture, "SVG of test digits and predictions");
  app.add_option(
      "--slow-rank", flags.slow_rank,
      "this rank computes more than the others, as one on a slower machine takes longer");
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return train(flags, group); });
}
