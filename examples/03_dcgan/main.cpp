// dcgan: two models, two optimizers and three losses, each with a loss scale of its own: a
// generator learns to draw digits that a discriminator takes for real ones. On one or many
// processes.
//
//   dcgan --picture samples.svg                   drawn digits, O1
//   dcgan --data MNIST_FOLDER --opt-level O2 --half-dtype bf16
//   cairn-run --nproc-per-node 2 dcgan --shard 2
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/data/loader.h"
#include "cairn/data/samplers.h"
#include "cairn/observe/run.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/distributed.h"
#include "networks.h"
#include "picture.h"
#include "support/digits_data.h"
#include "support/flags.h"
#include "support/normalize.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags {
  support::DigitsFlags data;
  support::Flags common;  // of them: opt level, half dtype, device, sharding, observe
  std::int64_t steps = 1500, batch_size = 64, nz = 64, ngf = 32, ndf = 32;
  double lr = 2e-4, beta1 = 0.5;
  std::uint64_t seed = 2809;
  int report_every = 100;
  std::string picture, checkpoint_dir;

  void add_to(CLI::App& app) {
    data.add_to(app);
    common.opt_level = "O1";
    app.add_option("--opt-level", common.opt_level, "O0, O1, O2 or O3")->capture_default_str();
    app.add_option("--half-dtype", common.half_dtype, "f16 or bf16")->capture_default_str();
    app.add_option("--device", common.device, "cpu or cuda")->capture_default_str();
    app.add_option("--steps", steps, "of both optimizers")
        ->capture_default_str()
        ->check(command_line::above_zero());
    app.add_option("--batch-size", batch_size, "of each process")
        ->capture_default_str()
        ->check(command_line::above_zero());
    app.add_option("--nz", nz, "noise values an image is drawn from")
        ->capture_default_str()
        ->check(command_line::above_zero());
    app.add_option("--ngf", ngf, "channels of the generator")
        ->capture_default_str()
        ->check(command_line::above_zero());
    app.add_option("--ndf", ndf, "channels of the discriminator")
        ->capture_default_str()
        ->check(command_line::above_zero());
    app.add_option("--lr", lr, "learning rate of both")->capture_default_str();
    app.add_option("--beta1", beta1, "of Adam")->capture_default_str();
    app.add_option("--seed", seed)->capture_default_str();
    app.add_option("--report-every", report_every, "steps between lines")
        ->capture_default_str()
        ->check(command_line::above_zero());
    app.add_option("--picture", picture, "SVG of samples beside training images");
    common.add_observe_to(app);
    app.add_option(
        "--checkpoint-dir", checkpoint_dir,
        "saves there at each report, and continues what it finds. SIGTERM saves and ends "
        "with status 75");
    common.add_shard_to(app);
  }
};

enum Loss { kReal, kFake, kFooled };

/// What a step tells.
struct Told {
  double d_loss = 0, g_loss = 0;
  double d_real = 0, d_fake = 0;  // mean probability that real and drawn images are real
};

class Gan {
 public:
  explicit Gan(const Flags& flags, const parallel::ProcessGroup& group, Device device)
      : nz_(flags.nz),
        device_(device),
        g_(dcgan::generator(flags.nz, flags.ngf)),
        d_(dcgan::discriminator(flags.ndf)),
        draws_histograms_(flags.common.histogram_every > 0),
        g_ddp_((prepare(g_), flags.common.data_parallel(g_, group))),
        d_ddp_((prepare(d_), flags.common.data_parallel(d_, group))),
        g_optimizer_(g_.parameters(), {.lr = flags.lr, .beta1 = flags.beta1}),
        d_optimizer_(d_.parameters(), {.lr = flags.lr, .beta1 = flags.beta1}),
        precision_(amp::initialize({&g_, &d_}, {&g_optimizer_, &d_optimizer_},
                                   {.opt_level = amp::parse_opt_level(flags.common.opt_level),
                                    .half_dtype = core::parse_dtype(flags.common.half_dtype),
                                    .num_losses = 3,
                                    .world = g_ddp_->world()})) {}

  /// `step`: its number.
  Told step(std::int64_t step, const Tensor& real, observe::Run* run) {
    const std::int64_t n = real.size(0);
    const Tensor ones = Tensor::full({n, 1}, 1.0, DType::f32, device_);
    const Tensor zeros = Tensor::zeros({n, 1}, DType::f32, device_);
    const Tensor fake = (*g_ddp_)(noise(n));

    const Tensor real_logits = judged(real);
    const Tensor real_loss = autograd::bce_with_logits(real_logits, ones);
    precision_.backward(real_loss, {.loss_id = kReal, .optimizers = {&d_optimizer_}});
    const Tensor fake_logits = judged(fake.detach());
    const Tensor fake_loss = autograd::bce_with_logits(fake_logits, zeros);
    precision_.backward(fake_loss, {.loss_id = kFake, .optimizers = {&d_optimizer_}});
    histograms("d.", d_, run);
    note(step, precision_.step(d_optimizer_), run);

    const Tensor fooled_loss = autograd::bce_with_logits(judged(fake), ones);
    precision_.backward(fooled_loss, {.loss_id = kFooled, .optimizers = {&g_optimizer_}});
    histograms("g.", g_, run);
    note(step, precision_.step(g_optimizer_), run);
    d_optimizer_.clear_grad();  // the last loss went through the discriminator as well
    return {real_loss.item() + fake_loss.item(), fooled_loss.item(), probability(real_logits),
            probability(fake_logits)};
  }

  /// [n, 1, 28, 28] in (-1, 1), the same noise at each call.
  Tensor samples(std::int64_t n) {
    autograd::ThreadState fixed = autograd::ThreadState::capture();
    fixed.grad_enabled = false;
    fixed.seed = 7, fixed.offset = 0;
    const autograd::ThreadStateGuard guard(fixed);
    return autograd::contiguous(as_f32(g_(noise(n))));
  }

  checkpointing::TrainingState state(core::Stateful& sampler) {
    return {{{"g", g_},
             {"d", d_},
             {"g_optimizer", g_optimizer_},
             {"d_optimizer", d_optimizer_},
             {"amp", precision_},
             {"sampler", sampler},
             {"g_ddp", *g_ddp_},
             {"d_ddp", *d_ddp_}},
            world()};
  }
  World world() const { return g_ddp_->world(); }
  /// Whole weights of the generator, for one process to use; a collective.
  auto whole_generator() { return g_ddp_->gather_parameters(); }
  const amp::Amp& precision() const { return precision_; }
  std::int64_t skipped() const { return skipped_; }

 private:
  void prepare(nn::Module& model) const {
    dcgan::initialize_weights(model);
    model.to(device_);
  }
  Tensor noise(std::int64_t n) const {
    Tensor z = Tensor::empty({n, nz_, 1, 1}, DType::f32, device_);
    nn::init::normal(z);
    return z;
  }
  Tensor judged(const Tensor& images) { return as_f32((*d_ddp_)(images)); }
  static Tensor as_f32(const Tensor& x) { return autograd::to(x, DType::f32); }
  static double probability(const Tensor& logits) {
    const autograd::NoGradGuard no_grad;
    return autograd::mean(autograd::sigmoid(logits)).item();
  }
  void histograms(const char* of, const nn::Module& net, observe::Run* run) const {
    if (run == nullptr || !draws_histograms_) return;
    NamedTensors parameters = net.parameters();
    for (NamedTensor& parameter : parameters) parameter.name = of + parameter.name;
    run->histograms(parameters);
  }
  void note(std::int64_t step, const optim::StepResult& result, observe::Run* run) {
    if (result.applied) return;
    ++skipped_;
    if (run != nullptr) run->event(observe::EventKind::skip, result.reason, result.culprit, step);
    if (world().rank == 0) std::printf("skipped: %s\n", result.reason.c_str());
  }

  std::int64_t nz_, skipped_ = 0;
  Device device_;
  nn::Sequential g_, d_;
  bool draws_histograms_;
  std::unique_ptr<parallel::DistributedDataParallel> g_ddp_, d_ddp_;
  optim::FusedAdam g_optimizer_, d_optimizer_;
  amp::Amp precision_;
};

void tell(observe::Run& run, std::int64_t step, const Told& told, const Gan& gan,
          double images_per_second, double machine_share) {
  const amp::Amp& p = gan.precision();
  run.step(step, {{"d_loss", told.d_loss},
                  {"g_loss", told.g_loss},
                  {"d_real", told.d_real},
                  {"d_fake", told.d_fake},
                  {"loss_scale_real", p.loss_scale(kReal)},
                  {"loss_scale_fake", p.loss_scale(kFake)},
                  {"loss_scale_fooled", p.loss_scale(kFooled)},
                  {"skipped", gan.skipped()},
                  {"images_per_second", images_per_second},
                  {"machine_share", machine_share}});
}

void report(const Flags& flags, std::int64_t step, const Told& told, const Gan& gan,
            double images_per_second) {
  const amp::Amp& p = gan.precision();
  if (gan.world().rank != 0) return;
  std::printf(
      "step %4lld/%lld  d_loss %.3f  g_loss %.3f  D(real) %.2f  D(fake) %.2f  scales %g %g %g  "
      "%.0f images/s\n",
      static_cast<long long>(step), static_cast<long long>(flags.steps), told.d_loss, told.g_loss,
      told.d_real, told.d_fake, p.loss_scale(kReal), p.loss_scale(kFake), p.loss_scale(kFooled),
      images_per_second);
  std::fflush(stdout);
}

int train(const Flags& flags, const parallel::ProcessGroup& group) {
  const Device device = group.device(flags.common.device);
  const support::Digits images = support::load_digits(flags.data, flags.seed);
  manual_seed(flags.seed);
  Gan gan(flags, group, device);
  const World world = gan.world();
  if (world.rank > 0)  // noise of its own
    manual_seed(flags.seed + static_cast<std::uint64_t>(world.rank));
  data::DistributedSampler sampler(images.train->size(), {.world = world, .seed = flags.seed});
  data::DataLoader loader(*images.train, sampler,
                          {.batch_size = flags.batch_size,
                           .drop_last = true,
                           .device = device,
                           .normalize = data::Normalize{.mean = 0.5, .deviation = 0.5},
                           .normalize_on_device = support::normalize});
  CAIRN_CHECK(loader.batches_per_epoch() > 0, "dcgan", "expected at least one batch, got ",
              images.train->size(), " images for a batch of ", flags.batch_size,
              " (lower --batch-size)");
  checkpointing::TrainingState state = gan.state(sampler);
  std::int64_t step = 0;
  if (!flags.checkpoint_dir.empty()) {
    state.save_on_signal(SIGTERM, flags.checkpoint_dir);
    if (const auto found = state.resume_latest(flags.checkpoint_dir)) step = found->step;
  }
  const std::string description =
      core::str(images.description, "; ", flags.common.describe(world, device, step));
  if (world.rank == 0) std::printf("%s\n", description.c_str());
  std::optional<observe::Run> observed;
  std::optional<support::MachineShare> machine_share;
  if (!flags.common.observe.empty()) {
    observed.emplace(flags.common.observe,
                     support::run_options(flags.common, {world, device, description, step}));
    machine_share.emplace(device, flags.common.dtype());
  }
  observe::Run* const run = observed ? &*observed : nullptr;

  support::Throughput throughput;
  while (step < flags.steps) {
    for (const data::Batch& batch : loader) {
      ++step;
      const Told told = gan.step(step, batch.inputs, run);
      throughput.step(flags.batch_size * world.size);
      if (run != nullptr)
        tell(*run, step, told, gan, throughput.per_second(), machine_share->take());
      if (step % flags.report_every == 0 || step == flags.steps) {
        report(flags, step, told, gan, throughput.per_second());
        if (!flags.checkpoint_dir.empty()) state.save(flags.checkpoint_dir, step);
      }
      state.end_on_signal(step);
      if (step == flags.steps) break;
    }
  }
  const auto whole = gan.whole_generator();
  if (world.rank != 0) return 0;
  if (run != nullptr)
    run->image("samples", autograd::affine(gan.samples(dcgan::kSamples), 0.5, 0.5));
  if (!flags.picture.empty()) {
    dcgan::save_picture(flags.picture, gan.samples(dcgan::kSamples), *images.train);
    std::printf("wrote %s\n", flags.picture.c_str());
  }
  std::printf("peak memory %s, %lld steps skipped\n",
              support::human_bytes(core::memory_stats(device).peak_total).c_str(),
              static_cast<long long>(gan.skipped()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a DCGAN on drawn or real handwritten digits in mixed precision", "dcgan");
  Flags flags;
  flags.add_to(app);
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return train(flags, group); });
}
