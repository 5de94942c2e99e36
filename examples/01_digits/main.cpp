// digits: the tutorials' ConvNet on drawn or real handwritten digits, in mixed precision, on one or
// many processes, resumable bit for bit.
//
//   digits                                            drawn digits, O2, one process
//   cairn-run --nproc-per-node 2 digits --accumulate 2 --checkpoint-dir runs/digits
//   digits --data MNIST_FOLDER --opt-level O0
#include "cairn/autograd/thread_state.h"
#include "cairn/core/generator.h"
#include "cairn/data/mean.h"

#include "picture.h"
#include "support/conv_net.h"
#include "support/digits_data.h"
#include "support/flags.h"
#include "support/trainer.h"

namespace {

using namespace cairn;

struct Flags : support::Flags {
  support::DigitsFlags data;
  std::string picture;
};

constexpr data::Normalize kNormalize{.mean = 0.1307, .deviation = 0.3081};  // MNIST's own

/// Share of the test images read right; each process reads its part of them.
double test_accuracy(support::Trainer& trainer, nn::Module& model, const data::Dataset& test) {
  autograd::NoGradGuard no_grad;
  model.eval();
  const World world = trainer.group().world();
  data::DistributedSampler sampler(test.size(), {.world = world, .shuffle = false, .exact = true});
  data::DataLoader loader(test, sampler,
                          {.batch_size = 250,
                           .device = trainer.device(),
                           .normalize = kNormalize,
                           .normalize_on_device = support::normalize});
  data::Mean accuracy;
  for (const data::Batch& batch : loader) {
    accuracy.add(support::accuracy(model(batch.inputs), batch.labels),
                 static_cast<double>(batch.size()));
  }
  model.train();
  return accuracy.over(world, "test accuracy");
}

int train(const Flags& flags) {
  const support::Digits images = support::load_digits(flags.data, flags.seed);
  manual_seed(flags.seed);
  nn::Sequential model = support::conv_net();
  support::Trainer trainer(flags, {.model = model,
                                   .train = *images.train,
                                   .description = images.description,
                                   .normalize = kNormalize});
  trainer.run();

  const double accuracy = test_accuracy(trainer, model, *images.test);
  support::Reporter& reporter = trainer.reporter();
  if (trainer.group().rank() == 0 && !flags.picture.empty()) {
    digits::save_picture(flags.picture, model, *images.test, kNormalize, trainer.device(),
                         reporter.losses());
  }
  reporter.finish(
      {{"test_accuracy", accuracy},
       {"steps", static_cast<double>(trainer.step())},
       {"images_per_second", reporter.per_second()}},
      {{"peak memory", support::human_bytes(core::memory_stats(trainer.device()).peak_total)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains the tutorials' ConvNet on drawn or real handwritten digits", "digits");
  Flags flags;
  flags.add_to(app);
  flags.data.add_to(app);
  app.add_option("--picture", flags.picture,
                 "PNG with test digits, predictions and the loss curve");
  return support::run_program(app, argc, argv, [&] { return train(flags); });
}
