// imagenet: Apex's ImageNet example for Cairn: ResNet-18, -34 or -50 on folders of JPEG and PNG
// files, in mixed precision, on one or many processes.
//
//   imagenet --data DIR                     DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg
//   imagenet --data DIR --pretrained resnet18.pth --evaluate [--logits ours.safetensors]
//   python3 compare.py DIR resnet18.pth ours.safetensors       torchvision's logits beside them
//   cairn-run --nproc-per-node 8 imagenet --data DIR --device cuda --arch resnet50 --sync-bn
#include <csignal>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/data/image_folder.h"
#include "cairn/data/transforms.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/schedule.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "resnet.h"
#include "support/accuracy.h"
#include "support/flags.h"
#include "support/normalize.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags : support::Flags {
  std::string data, arch = "resnet50", pretrained, logits;
  bool evaluate = false, sync_batch_norm = false;
  int workers = 4, warm_up = 5, patience = 0;
  std::int64_t size = 224;
  double label_smoothing = 0, color = 0;

  void add_to(CLI::App& app) {
    support::Flags::add_to(app);
    app.get_option("--lr")->description(
        "learning rate of 256 images a step; of more or fewer, in proportion");
    app.add_option("--data", data, "folder with train/CLASS/PICTURE and val/CLASS/PICTURE")
        ->required()
        ->check(CLI::ExistingDirectory);
    app.add_option("--arch", arch, "the net")
        ->check(CLI::IsMember({"resnet18", "resnet34", "resnet50"}));
    app.add_option("--pretrained", pretrained,
                   "weights to begin with: .pth of torchvision's models, or .safetensors")
        ->check(CLI::ExistingFile);
    app.add_flag("--evaluate", evaluate, "only tests the weights");
    app.add_option("--logits", logits, "file for the logits of the pictures in val, [N, classes]");
    app.add_flag("--sync-bn", sync_batch_norm, "batch norms see all processes' images");
    app.add_option("--workers", workers, "threads that decode, in each process")
        ->check(CLI::Range(0, 256));
    app.add_option("--warm-up", warm_up, "epochs over which the learning rate rises")
        ->check(CLI::Range(0, 1000));
    app.add_option("--patience", patience,
                   "stops after so many epochs whose top-1 is no better than the best; 0: never")
        ->check(CLI::Range(0, 1000));
    app.add_option("--image-size", size, "pixels of a side")->check(CLI::Range(8, 4096));
    app.add_option("--label-smoothing", label_smoothing, "of the loss")
        ->check(CLI::Range(0.0, 0.99));
    app.add_option("--color", color, "changes of brightness, contrast and saturation up to this")
        ->check(CLI::Range(0.0, 1.0));
  }
};

const data::Normalize kNormalize{.mean = {0.485, 0.456, 0.406},
                                 .deviation = {0.229, 0.224, 0.225}};  // ImageNet's own

data::LoaderOptions loader_options(const Flags& flags, Device device) {
  return {.batch_size = flags.batch_size,
          .workers = flags.workers,
          .prefetch = 2 * std::max(1, flags.workers),
          .device = device,
          .normalize = kNormalize,
          .normalize_on_device = support::normalize};
}

data::TransformedDataset augmented(const data::ImageFolder& images, const Flags& flags) {
  std::vector<data::Transform> changes{data::random_horizontal_flip()};
  if (flags.color > 0) {
    changes.push_back(data::color_jitter(
        {.brightness = flags.color, .contrast = flags.color, .saturation = flags.color}));
  }
  return {images, changes};
}

/// Top-1 and top-5.
std::vector<double> test(nn::Module& model, const data::ImageFolder& images, const World& world,
                         const data::LoaderOptions& options) {
  return support::test_accuracies(model, images, world, options, {1, 5});
}

void write_logits(nn::Module& model, const data::ImageFolder& images, const std::string& path,
                  const data::LoaderOptions& options) {
  const autograd::NoGradGuard no_grad;
  model.eval();
  data::SequentialSampler sampler(images.size());
  data::DataLoader loader(images, sampler, options);
  std::vector<Tensor> all;
  for (const data::Batch& batch : loader)
    all.push_back(autograd::to(autograd::to(model(batch.inputs), DType::f32), Device{}));
  checkpointing::write_safetensors(path, {{"logits", autograd::concat(all)}});
}

/// Of a batch of 256; as Apex's example scales it.
void scale_learning_rate(Flags& flags, const World& world) {
  flags.lr *= static_cast<double>(flags.batch_size) * flags.accumulate * world.size / 256;
}

int train(Flags flags, const parallel::ProcessGroup& group) {
  const data::ImageFolder pictures(flags.data + "/train",
                                   {.size = flags.size, .random_resized_crop = true});
  const data::ImageFolder validation(flags.data + "/val",
                                     {.size = flags.size, .resize = flags.size * 256 / 224});
  CAIRN_CHECK(pictures.classes() == validation.classes(), "imagenet",
              "expected the same classes in train and val, got ", pictures.classes().size(),
              " and ", validation.classes().size());
  const data::TransformedDataset training = augmented(pictures, flags);

  manual_seed(flags.seed);
  imagenet::ResNet model(flags.arch, static_cast<std::int64_t>(pictures.classes().size()));
  if (!flags.pretrained.empty()) checkpointing::load(model, flags.pretrained);
  const Device device = group.device(flags.device);
  model.to(device);
  if (flags.sync_batch_norm) parallel::convert_sync_batch_norm(model, group);
  const std::unique_ptr<parallel::DistributedDataParallel> ddp = flags.data_parallel(model, group);
  const World world = ddp->world();
  scale_learning_rate(flags, world);
  const std::shared_ptr<optim::Optimizer> optimizer = flags.make_optimizer(model.parameters());
  amp::Amp precision = amp::initialize(model, *optimizer, flags.amp_options(world));

  data::DistributedSampler sampler(training.size(), {.world = world, .seed = flags.seed});
  data::LoaderOptions options = loader_options(flags, device);
  options.drop_last = true;
  data::DataLoader loader(training, sampler, options);
  const std::int64_t total_steps = flags.total_steps(loader);
  const std::int64_t up =
      std::min(total_steps / 2, flags.warm_up * loader.batches_per_epoch() / flags.accumulate);
  optim::Schedule schedule(*optimizer,
                           optim::warm_up(up, flags.learning_rate_curve(total_steps - up)));
  optim::Accumulation accumulation({.steps = flags.accumulate, .world = world});
  optim::EarlyStopping stopping(
      {.patience = std::max(1, flags.patience), .higher_is_better = true});
  const auto stopped = [&] { return flags.patience > 0 && stopping.stopped(); };

  checkpointing::TrainingState state({{"model", model},
                                      {"optimizer", *optimizer},
                                      {"amp", precision},
                                      {"schedule", schedule},
                                      {"accumulation", accumulation},
                                      {"sampler", sampler},
                                      {"stopping", stopping},
                                      {"ddp", *ddp}},
                                     world, {.keep_best = 1, .best = checkpointing::Best::highest});
  if (!flags.checkpoint_dir.empty()) state.save_on_signal(SIGTERM, flags.checkpoint_dir);
  std::int64_t step = flags.resume(state);
  support::Reporter reporter(
      flags,
      {.world = world,
       .device = device,
       .description = core::str(flags.arch, "; ", pictures.size(), " pictures of ",
                                pictures.classes().size(), " classes, tested on ",
                                validation.size(), "; ", flags.describe(world, device, step)),
       .first_step = step,
       .total_steps = total_steps});
  const std::int64_t images_per_step =
      std::int64_t{flags.batch_size} * flags.accumulate * world.size;

  std::vector<double> accuracy;
  observe::Span part(reporter.run(), "data");
  while (!flags.evaluate && step < total_steps && !stopped()) {
    for (const data::Batch& batch : loader) {
      part.next("forward");
      const optim::MicroBatch micro = accumulation.begin(batch.size());
      const Tensor logits = (*ddp)(batch.inputs);
      const Tensor loss =
          nn::cross_entropy(logits, batch.labels, {.label_smoothing = flags.label_smoothing});
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
      if (flags.save_due(step, total_steps) && step < total_steps) {
        state.save(flags.checkpoint_dir, step);
        reporter.saved(step);
      }
      state.end_on_signal(step);
      part.next("data");
      if (step == total_steps) break;
    }
    part.next("test");
    accuracy = test(model, validation, world, loader_options(flags, device));
    (void)stopping.step(accuracy[0]);
    reporter.note(core::str("step ", step, ": top-1 ", 100 * accuracy[0], " %, top-5 ",
                            100 * accuracy[1], " %"));
    part.next("save");
    if (!flags.checkpoint_dir.empty()) {
      state.save(flags.checkpoint_dir, step, accuracy[0]);
      reporter.saved(step);
    }
    part.next("data");
  }
  if (stopped()) {
    reporter.note(core::str("stopped: top-1 was no better than ", 100 * stopping.best(), " % for ",
                            flags.patience, " epochs"));
  }
  if (accuracy.empty()) accuracy = test(model, validation, world, loader_options(flags, device));

  if (!flags.logits.empty() && world.rank == 0)
    write_logits(model, validation, flags.logits, loader_options(flags, device));
  std::vector<std::pair<std::string, double>> numbers{{"top1", accuracy[0]}, {"top5", accuracy[1]}};
  if (!flags.evaluate) {
    numbers.push_back({"steps", static_cast<double>(step)});
    numbers.push_back({"images_per_second", reporter.per_second()});
  }
  reporter.finish(numbers,
                  {{"peak memory", support::human_bytes(core::memory_stats(device).peak_total)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a ResNet on folders of pictures", "imagenet");
  Flags flags;
  flags.epochs = 90;
  flags.batch_size = 256;
  flags.optimizer = "sgd";
  flags.lr = 0.1;
  flags.weight_decay = 1e-4;
  flags.schedule = "steps";
  flags.add_to(app);
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return train(flags, group); });
}
