// accumulation: the same ConvNet trained twice, with whole batches and with uneven micro-batches
// that add up to them (optim::Accumulation), on one or many processes: the gradients agree, the
// memory does not.
//
//   accumulation                                      4 micro-batches, O2
//   accumulation --micro-batches 8 --opt-level O0     in f32: equal up to rounding
//   cairn-run --nproc-per-node 2 accumulation         micro-batches of two processes
//
// The net has no batch norm: its statistics are of a micro-batch, so results would differ.
#include <cmath>
#include <cstdio>
#include <optional>

#include "cairn/amp/amp.h"
#include "cairn/core/generator.h"
#include "cairn/data/drawn_digits.h"
#include "cairn/data/loader.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/schedule.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "support/flags.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags {
  int micro_batches = 4;
  int batch_size = 240;
  int steps = 20;
  double lr = 0.05;
  support::Flags common;  // of them: opt level, half dtype, device, seed

  void add_to(CLI::App& app) {
    app.option_defaults()->always_capture_default();
    app.add_option("--micro-batches", micro_batches, "parts of a batch, per process")
        ->check(CLI::Range(1, 1000));
    app.add_option("--batch-size", batch_size, "samples of a step, over all processes")
        ->check(CLI::Range(1, 1 << 20));
    app.add_option("--steps", steps, "optimizer steps")->check(CLI::Range(1, 1 << 20));
    app.add_option("--lr", lr, "learning rate of SGD with momentum 0.9")
        ->check(command_line::above_zero());
    app.add_option("--opt-level", common.opt_level, "precision: O0, O1, O2 or O3")
        ->check(CLI::IsMember({"O0", "O1", "O2", "O3"}));
    app.add_option("--half-dtype", common.half_dtype, "the half type of O1 - O3")
        ->check(CLI::IsMember({"f16", "bf16"}));
    common.add_device_to(app);
    app.add_option("--seed", common.seed, "of initialisation, order and data");
  }
};

nn::Sequential plain_conv_net() {
  return nn::Sequential(nn::Conv2d(1, 16, 5, {.padding = 2}), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Conv2d(16, 32, 5, {.padding = 2}), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Flatten(), nn::Linear(32 * 7 * 7, 10));
}

/// A model with all that trains it.
struct Training {
  Training(const Flags& flags, const parallel::ProcessGroup& group, Device device)
      : model(seeded_net(flags.common.seed)),
        ddp((model.to(device), model), group),
        optimizer(model.parameters(), {.lr = flags.lr, .momentum = 0.9}),
        precision(amp::initialize(model, optimizer, flags.common.amp_options(ddp.world()))),
        schedule(optimizer, optim::cosine(flags.steps)) {}

  static nn::Sequential seeded_net(std::uint64_t seed) {
    manual_seed(seed);
    return plain_conv_net();
  }

  nn::Sequential model;
  parallel::DistributedDataParallel ddp;
  optim::FusedSGD optimizer;
  amp::Amp precision;
  optim::Schedule schedule;
};

/// What one step did.
struct Step {
  double loss = 0.0;              // mean over the whole batch
  std::vector<double> gradients;  // unscaled, of all parameters
  std::size_t activations = 0;    // peak bytes
  optim::StepResult result;
};

std::vector<double> gradients_of(const Training& training, double factor) {
  std::vector<double> all;
  const double scale = factor / training.precision.loss_scale();
  for (const auto& [name, tensor] : training.model.parameters()) {
    for (const double g : tensor.grad().to_vector<double>()) all.push_back(g * scale);
  }
  return all;
}

std::size_t peak_activations(Device device) {
  return core::memory_stats(device).peak_of(core::MemoryCategory::activations);
}

Step whole_batch(Training& training, const data::Batch& batch) {
  Step step;
  core::reset_peak_memory(batch.inputs.device());
  {
    const Tensor loss = nn::cross_entropy(training.model(batch.inputs), batch.labels);
    training.precision.backward(loss);
    step.loss = loss.item();
  }
  step.activations = peak_activations(batch.inputs.device());
  step.gradients = gradients_of(training, 1.0);
  step.result = training.precision.step();
  training.schedule.step(step.result);
  return step;
}

/// Where part i of n begins: parts of one, two and three shares in turn.
std::int64_t part_begin(std::int64_t samples, int part, int parts) {
  const auto shares = [](int count) { return count / 3 * 6 + (count % 3 == 2 ? 3 : count % 3); };
  return samples * shares(part) / shares(parts);
}

Tensor rows(const Tensor& x, std::int64_t begin, std::int64_t end) {
  return x.alias(x.view().slice(0, begin, end));
}

/// The same batch, by the micro-batches of all processes.
class Accumulated {
 public:
  Accumulated(Training& training, const parallel::ProcessGroup& group, int micro_batches)
      : training_(training),
        group_(group),
        micro_batches_(micro_batches),
        accumulation_({.steps = micro_batches, .world = training.ddp.world()}) {}

  Step step(const data::Batch& batch) {
    Step step;
    const int parts = micro_batches_ * group_.world_size();
    core::reset_peak_memory(batch.inputs.device());
    double loss_sum = 0.0;
    for (int k = 0; k < micro_batches_; ++k) {
      const int part = group_.rank() * micro_batches_ + k;
      const std::int64_t begin = part_begin(batch.size(), part, parts);
      const std::int64_t end = part_begin(batch.size(), part + 1, parts);
      const auto micro = accumulation_.begin(end - begin);
      const Tensor loss = nn::cross_entropy(training_.ddp(rows(batch.inputs, begin, end)),
                                            rows(batch.labels, begin, end));
      training_.precision.backward(loss, {.weight = micro.weight()});
      loss_sum += loss.item() * static_cast<double>(end - begin);
    }
    step.activations = peak_activations(batch.inputs.device());
    // The boundary: the only place for the optimizer, the schedule and checkpoints.
    const double factor = accumulation_.finish();
    step.gradients = gradients_of(training_, factor);
    step.result = training_.precision.step({.gradient_scale = factor});
    training_.schedule.step(step.result);
    step.loss = group_.all_reduce_sum(loss_sum, "loss") / static_cast<double>(batch.size());
    return step;
  }

 private:
  Training& training_;
  parallel::ProcessGroup group_;
  int micro_batches_;
  optim::Accumulation accumulation_;
};

/// The largest difference, relative to the largest element.
double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0.0, largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(a[i]));
  }
  return largest > 0 ? most / largest : most;
}

int run(const Flags& flags, const parallel::ProcessGroup& group) {
  const Device device = group.device(flags.common.device);
  CAIRN_CHECK(flags.batch_size >= 6 * flags.micro_batches * group.world_size(), "accumulation",
              "expected at least 6 samples for each of the ",
              flags.micro_batches * group.world_size(), " micro-batches, got a batch of ",
              flags.batch_size, " (raise --batch-size or lower --micro-batches)");
  const bool speaks = group.rank() == 0;
  const data::DrawnDigits digits(flags.common.seed, std::max(flags.batch_size, 1200));
  data::RandomSampler sampler(digits.size(), flags.common.seed);
  data::DataLoader loader(digits, sampler,
                          {.batch_size = flags.batch_size,
                           .drop_last = true,
                           .device = device,
                           .normalize = data::Normalize{}});
  Training whole(flags, parallel::ProcessGroup::single(), device), parts(flags, group, device);
  Accumulated accumulated(parts, group, flags.micro_batches);
  if (speaks) {
    std::printf("%d samples a step: whole, and as %d uneven micro-batches of %d process(es)\n",
                flags.batch_size, flags.micro_batches * group.world_size(), group.world_size());
  }

  double worst = 0.0;
  std::size_t most_whole = 0, most_parts = 0;
  for (int done = 0; done < flags.steps;) {
    for (const data::Batch& batch : loader) {
      const Step a = whole_batch(whole, batch), b = accumulated.step(batch);
      ++done;
      most_whole = std::max(most_whole, a.activations);
      most_parts = std::max(most_parts, b.activations);
      const bool applied = a.result.applied && b.result.applied;
      const double differs = applied ? difference(a.gradients, b.gradients) : 0.0;
      worst = std::max(worst, differs);
      if (speaks && applied) {
        std::printf("step %d/%d: loss %.6f whole, %.6f in parts; gradients differ by %.1e\n", done,
                    flags.steps, a.loss, b.loss, differs);
      } else if (speaks) {
        std::printf("step %d/%d skipped: %s\n", done, flags.steps,
                    (a.result.applied ? b : a).result.reason.c_str());
      }
      if (done == flags.steps) break;
    }
  }
  if (speaks) {
    std::printf("gradients differ by at most %.1e of their largest element\n", worst);
    std::printf("peak activations: %s whole, %s in parts\n",
                support::human_bytes(most_whole).c_str(), support::human_bytes(most_parts).c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a ConvNet with whole batches and with micro-batches that add up to them",
               "accumulation");
  Flags flags;
  flags.add_to(app);
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return run(flags, group); });
}
