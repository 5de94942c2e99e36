// fashion: a small residual net on Fashion-MNIST (Debian's package dataset-fashion-mnist), in mixed
// precision, on one or many processes.
//
//   fashion                                            O2, one process
//   cairn-run --nproc-per-node 2 fashion --batch-size 64
//   fashion --opt-level O0 --optimizer adam --lr 3e-3
#include <csignal>
#include <filesystem>

#include "cairn/amp/amp.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/data/idx.h"
#include "cairn/data/transforms.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/schedule.h"
#include "cairn/optim/weight_average.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/sync_batch_norm.h"

#include "net.h"
#include "support/accuracy.h"
#include "support/flags.h"
#include "support/normalize.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags : support::Flags {
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::int64_t train_size = 60000, test_size = 10000;
};

const data::Normalize kNormalize{.mean = 0.2860, .deviation = 0.3530};  // Fashion-MNIST's own

struct Images {
  data::TensorDataset train, test;
};

data::TensorDataset first_images(const data::ImageSet& set, std::int64_t count) {
  const auto rows = [end = std::min(count, set.size())](const Tensor& x) {
    return x.alias(x.view().slice(0, 0, end));
  };
  return data::image_dataset({rows(set.images), rows(set.labels)});
}

Images load_images(const Flags& flags) {
  if (!std::filesystem::is_directory(flags.data)) {
    core::fail<core::IoError>("fashion", "expected a folder with Fashion-MNIST's files, got '",
                              flags.data, "' (install the package dataset-fashion-mnist of Debian ",
                              "or Ubuntu, or name another folder with --data)");
  }
  const data::ImageSplit split = data::read_image_folder(flags.data);
  return {first_images(split.train, flags.train_size), first_images(split.test, flags.test_size)};
}

data::LoaderOptions loader_options(std::int64_t batch_size, Device device) {
  return {.batch_size = batch_size,
          .device = device,
          .normalize = kNormalize,
          .normalize_on_device = support::normalize};
}

/// Up during the first sixth of the steps, then down.
optim::Curve learning_rate(const Flags& flags, std::int64_t total_steps) {
  const std::int64_t up = total_steps / 6;
  return optim::warm_up(up, flags.learning_rate_curve(total_steps - up));
}

/// Of an average over the last twentieth of the steps.
double decay(std::int64_t total_steps) {
  return std::max(0.0, 1 - 20.0 / static_cast<double>(total_steps));
}

/// What an average of the model's weights goes along with: running statistics too.
NamedTensors weights_and_statistics(const nn::Module& model) {
  NamedTensors all = model.parameters();
  for (const NamedTensor& buffer : model.buffers()) all.push_back(buffer);
  return all;
}

int train(const Flags& flags, const parallel::ProcessGroup& group) {
  const Images images = load_images(flags);
  const data::TransformedDataset augmented(
      images.train, {data::random_crop({.padding = 1}), data::random_horizontal_flip()});
  manual_seed(flags.seed);
  nn::Sequential model = fashion::net();
  const Device device = group.device(flags.device);
  model.to(device);

  if (group.world().size > 1) parallel::convert_sync_batch_norm(model, group);
  const std::unique_ptr<parallel::DistributedDataParallel> ddp = flags.data_parallel(model, group);
  const World world = ddp->world();
  const std::shared_ptr<optim::Optimizer> optimizer = flags.make_optimizer(model.parameters());
  amp::Amp precision = amp::initialize(model, *optimizer, flags.amp_options(world));

  data::DistributedSampler sampler(augmented.size(), {.world = world, .seed = flags.seed});
  data::LoaderOptions options = loader_options(flags.batch_size, device);
  options.drop_last = true;
  data::DataLoader loader(augmented, sampler, options);
  const std::int64_t total_steps = flags.total_steps(loader);
  optim::Schedule schedule(*optimizer, learning_rate(flags, total_steps));
  optim::Accumulation accumulation({.steps = flags.accumulate, .world = world});
  optim::WeightAverage average(weights_and_statistics(model), {.decay = decay(total_steps)});

  checkpointing::TrainingState state({{"model", model},
                                      {"optimizer", *optimizer},
                                      {"amp", precision},
                                      {"average", average},
                                      {"schedule", schedule},
                                      {"accumulation", accumulation},
                                      {"sampler", sampler},
                                      {"ddp", *ddp}},
                                     world);
  if (!flags.checkpoint_dir.empty()) state.save_on_signal(SIGTERM, flags.checkpoint_dir);
  std::int64_t step = flags.resume(state);
  support::Reporter reporter(
      flags,
      {.world = world,
       .device = device,
       .description = core::str(images.train.size(), " images of ", flags.data, ", tested on ",
                                images.test.size(), "; ", flags.describe(world, device, step)),
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
      const Tensor loss = nn::cross_entropy(logits, batch.labels, {.label_smoothing = 0.1});
      part.next("backward");
      precision.backward(loss, {.weight = micro.weight()});
      reporter.micro_batch(loss.item(), support::accuracy(logits, batch.labels));
      part.next(micro.last() ? "update" : "data");
      if (!micro.last()) continue;
      reporter.histograms(model);

      const double lr = optimizer->lr();
      const optim::StepResult result = precision.step({.gradient_scale = accumulation.finish()});
      schedule.step(result);
      if (result.applied) average.update();
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

  const double last =
      support::test_accuracy(model, images.test, world, loader_options(250, device));
  const auto averaged = average.use();
  const double test =
      support::test_accuracy(model, images.test, world, loader_options(250, device));
  reporter.finish({{"test_accuracy", test},
                   {"of_last_weights", last},
                   {"steps", static_cast<double>(step)},
                   {"images_per_second", reporter.per_second()}},
                  {{"peak memory", support::human_bytes(core::memory_stats(device).peak_total)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small residual net on Fashion-MNIST", "fashion");
  Flags flags;
  flags.epochs = 5;
  flags.batch_size = 128;
  flags.optimizer = "sgd";
  flags.lr = 0.1;
  flags.weight_decay = 5e-4;
  flags.add_to(app);
  app.add_option("--data", flags.data, "IDX folder with MNIST's file names, .gz or not");
  app.add_option("--train-size", flags.train_size, "the first images of the training set")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--test-size", flags.test_size, "the first images of the test set")
      ->check(CLI::Range(1, 1 << 30));
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return train(flags, group); });
}
