// char_lm: a small GPT on any text, byte by byte, in mixed precision, on one or many processes.
//
//   char_lm                                    the project's own docs
//   char_lm --text shakespeare.txt --layers 6 --width 192 --steps 2000
#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <iostream>

#include "baselines.h"
#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/data/mean.h"
#include "cairn/data/text.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/schedule.h"
#include "cairn/parallel/distributed.h"
#include "support/flags.h"
#include "support/gpt.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags : support::Flags {
  std::vector<std::string> text;
  support::GptSizes sizes;
  std::string prompt = "The ";
  int sample = 400;
  double temperature = 0.8;

  void add_to(CLI::App& app) {
    support::Flags::add_to(app);
    app.add_option("--text", text, "text files; default: the project's own docs")
        ->check(CLI::ExistingFile);
    app.add_option("--layers", sizes.layers, "blocks")->check(CLI::Range(1, 1000));
    app.add_option("--width", sizes.width, "model width D, a multiple of --heads")
        ->check(CLI::Range(1, 1 << 16));
    app.add_option("--heads", sizes.heads, "attention heads")->check(CLI::Range(1, 1024));
    app.add_option("--tokens", sizes.tokens, "window length T, bytes")
        ->check(CLI::Range(2, 1 << 16));
    app.add_option("--dropout", sizes.dropout, "dropout probability")->check(CLI::Range(0.0, 0.99));
    app.add_option("--prompt", prompt, "start of the sample");
    app.add_option("--sample", sample, "bytes to sample at the end; 0: none")
        ->check(CLI::Range(0, 1 << 20));
    app.add_option("--temperature", temperature, "of the sample")
        ->check(command_line::above_zero());
  }
};

std::vector<std::string> project_docs() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(CAIRN_DOCS_DIR)) {
    if (entry.path().extension() == ".md") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Mean loss per byte on the test text; the processes share its windows.
double test_loss(nn::Module& model, const data::Dataset& test, const World& world, Device device) {
  const autograd::NoGradGuard no_grad;
  model.eval();
  data::DistributedSampler sampler(test.size(), {.world = world, .shuffle = false, .exact = true});
  data::DataLoader loader(test, sampler, {.batch_size = 16, .device = device});
  data::Mean loss;
  for (const data::Batch& batch : loader) {
    loss.add(nn::cross_entropy(model(batch.inputs), batch.labels).item(),
             static_cast<double>(batch.size()));
  }
  model.train();
  return loss.over(world, "test loss");
}

std::int64_t draw(const std::vector<double>& logits, double temperature, Generator& generator) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> cumulative;
  double total = 0;
  cumulative.reserve(logits.size());
  for (const double logit : logits)
    cumulative.push_back(total += std::exp((logit - top) / temperature));
  const double at =
      core::uniform_from_bits(core::philox(generator.seed(), generator.next(), 0)[0]) * total;
  return std::upper_bound(cumulative.begin(), cumulative.end() - 1, at) - cumulative.begin();
}

std::string sample(support::Gpt& model, const data::Vocabulary& vocabulary, const Flags& flags,
                   Device device) {
  autograd::NoGradGuard no_grad;
  model.eval();
  Generator generator(flags.seed);
  std::vector<std::int64_t> tokens;
  for (const std::int32_t token : vocabulary.encode(flags.prompt)) tokens.push_back(token);
  for (int i = 0; i < flags.sample; ++i) {
    const auto window =
        std::min<std::int64_t>(static_cast<std::int64_t>(tokens.size()), model.sizes().tokens);
    const std::vector<std::int64_t> context(tokens.end() - window, tokens.end());
    const Tensor logits = model(Tensor::from(context, {1, window}, DType::i64, device));
    tokens.push_back(draw(autograd::slice(logits, 1, window - 1, window).to_vector(),
                          flags.temperature, generator));
  }
  return vocabulary.decode(tokens);
}

void check(const Flags& flags) {
  CAIRN_CHECK(flags.sizes.width % flags.sizes.heads == 0, "char_lm",
              "expected --width to be a multiple of --heads, got ", flags.sizes.width, " and ",
              flags.sizes.heads);
  CAIRN_CHECK(!flags.prompt.empty(), "char_lm", "expected a --prompt of at least one byte");
}

int train(const Flags& flags, const parallel::ProcessGroup& group) {
  check(flags);
  const std::vector<std::string> files = flags.text.empty() ? project_docs() : flags.text;
  const auto text = data::TextDataset::from_files(
      files, {.window = flags.sizes.tokens, .stride = flags.sizes.tokens / 2});
  const auto [training, test] = text.split(0.9);
  support::GptSizes sizes = flags.sizes;
  sizes.vocabulary = text.vocabulary().size();

  manual_seed(flags.seed);
  support::Gpt model(sizes);
  const Device device = group.device(flags.device);
  model.to(device);

  const std::unique_ptr<parallel::DistributedDataParallel> ddp = flags.data_parallel(model, group);
  const World world = ddp->world();
  const std::shared_ptr<optim::Optimizer> optimizer = flags.make_optimizer(model.parameters());
  amp::Amp precision = amp::initialize(model, *optimizer, flags.amp_options(world));

  data::DistributedSampler sampler(training.size(), {.world = world, .seed = flags.seed});
  data::DataLoader loader(training, sampler,
                          {.batch_size = flags.batch_size, .drop_last = true, .device = device});
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
  support::Reporter reporter(
      flags, {.world = world,
              .device = device,
              .description = core::str(text.tokens().size(), " bytes of ", files.size(),
                                       " file(s); ", flags.describe(world, device, step)),
              .unit = "tokens",
              .first_step = step,
              .total_steps = total_steps,
              .accuracy = false});
  const std::int64_t tokens_per_step =
      std::int64_t{flags.batch_size} * flags.accumulate * world.size * flags.sizes.tokens;

  observe::Span part(reporter.run(), "data");
  while (step < total_steps) {
    for (const data::Batch& batch : loader) {
      part.next("forward");
      const optim::MicroBatch micro = accumulation.begin(batch.size());
      const Tensor loss = nn::cross_entropy((*ddp)(batch.inputs), batch.labels);
      part.next("backward");
      precision.backward(loss, {.weight = micro.weight()});
      reporter.micro_batch(loss.item());
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
                     .units = tokens_per_step,
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

  const auto whole = ddp->gather_parameters();  // each process evaluates by itself
  reporter.finish({{"test_loss", test_loss(model, test, world, device)},
                   {"unigram_loss", char_lm::unigram_loss(training, test)},
                   {"bigram_loss", char_lm::bigram_loss(training, test)},
                   {"tokens_per_second", reporter.per_second()}},
                  {{"peak memory", support::human_bytes(core::memory_stats(device).peak_total)}});
  if (world.rank == 0 && flags.sample > 0)
    std::cout << "\n" << sample(model, text.vocabulary(), flags, device) << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small GPT on text, byte by byte", "char_lm");
  Flags flags;
  flags.batch_size = 16;
  flags.epochs = 10;
  flags.add_to(app);
  flags.add_shard_to(app);
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return train(flags, group); });
}
