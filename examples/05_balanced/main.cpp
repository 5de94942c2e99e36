// balanced: a language model of 40,000 words on several devices of one process, its loss computed
// in two ways: on the first device, from gathered outputs (DataParallel), and on each device, from
// its own (DataParallelModel and DataParallelCriterion). The losses agree; the first device's
// memory does not.
//
//   balanced                                          4 CPU devices
//   balanced --devices 2 --picture memory.svg         a picture of the table
//   balanced --device cuda --devices 8 --width 1024 --batch-size 256 --length 64
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/data_parallel.h"
#include "picture.h"
#include "support/flags.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

struct Flags {
  int devices = 4, steps = 4, batch_size = 16, length = 16, words = 40'000, width = 64;
  double lr = 4.0;
  std::uint64_t seed = 1;
  std::string device = "cpu", picture;

  void add_to(CLI::App& app) {
    app.option_defaults()->always_capture_default();
    app.add_option("--devices", devices, "how many devices")->check(CLI::Range(1, 64));
    app.add_option("--device", device, "what they are: cpu or cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}));
    app.add_option("--steps", steps, "optimizer steps")->check(CLI::Range(1, 1 << 20));
    app.add_option("--batch-size", batch_size, "sentences of a step, over all devices")
        ->check(CLI::Range(1, 1 << 20));
    app.add_option("--length", length, "words of a sentence")->check(CLI::Range(1, 1 << 16));
    app.add_option("--words", words, "words of the language")->check(CLI::Range(2, 1 << 24));
    app.add_option("--width", width, "width of embedding and LSTM")->check(CLI::Range(1, 1 << 14));
    app.add_option("--lr", lr, "learning rate of SGD with momentum 0.9")
        ->check(command_line::above_zero());
    app.add_option("--seed", seed, "of initialisation and sentences");
    app.add_option("--picture", picture, "an SVG of each device's memory; none: no picture");
  }
};

/// Words [B, T] -> logits [B, T, words].
class LanguageModel : public nn::Module {
 public:
  LanguageModel(std::int64_t words, std::int64_t width)
      : words_(words),
        width_(width),
        embedding_(add_module("embedding", nn::Embedding(words, width))),
        lstm_(add_module("lstm", nn::LSTM(width, width))),
        out_(add_module("out", nn::Linear(width, words))) {}
  std::string kind() const override { return "LanguageModel"; }
  Tensor forward(const Tensor& x) override {
    const Tensor steps = autograd::transpose((*embedding_)(x), 0, 1);  // [T, B, width]
    return (*out_)(autograd::transpose((*lstm_)(steps), 0, 1));
  }

 protected:
  std::shared_ptr<nn::Module> make_like() const override {
    return std::make_shared<LanguageModel>(words_, width_);
  }

 private:
  std::int64_t words_, width_;
  std::shared_ptr<nn::Embedding> embedding_;
  std::shared_ptr<nn::LSTM> lstm_;
  std::shared_ptr<nn::Linear> out_;
};

/// Sentences [B, T + 1] whose words are as frequent as those of languages: the k-th about 1 / k.
Tensor sentences(const Flags& flags, int step, Device device) {
  const Shape shape{flags.batch_size, flags.length + 1};
  const Tensor uniform = Tensor::empty(shape, DType::f32, Device{});
  Generator(flags.seed + 1 + static_cast<std::uint64_t>(step)).fill_uniform(uniform, 0.0, 1.0);
  std::vector<std::int64_t> words;
  for (const double u : uniform.to_vector()) {
    const auto word = static_cast<std::int64_t>(std::pow(static_cast<double>(flags.words), u)) - 1;
    words.push_back(std::min<std::int64_t>(word, flags.words - 1));
  }
  return Tensor::from(words, shape, DType::i64, device);
}

Tensor loss_of(const Tensor& logits, const Tensor& next) {
  return nn::cross_entropy(logits, next);
}

enum class Way { gathered, balanced };

/// Trains a fresh model; the losses of the steps and the peak memory of each device.
struct Result {
  std::vector<double> losses;
  std::vector<std::size_t> peaks;
};

Result train(const Flags& flags, const std::vector<Device>& devices, Way way) {
  manual_seed(flags.seed);
  const core::DefaultDeviceGuard on_first(devices[0]);
  for (const Device device : devices) core::reset_peak_memory(device);
  LanguageModel model(flags.words, flags.width);
  optim::FusedSGD optimizer(model.parameters(), {.lr = flags.lr, .momentum = 0.9});
  parallel::DataParallelModel on_all(model, devices);
  parallel::DataParallelCriterion criterion(loss_of);
  Result result;
  for (int step = 0; step < flags.steps; ++step) {
    const Tensor words = sentences(flags, step, devices[0]);
    const Tensor x = autograd::contiguous(autograd::slice(words, 1, 0, flags.length));
    const Tensor next = autograd::contiguous(autograd::slice(words, 1, 1, flags.length + 1));
    Tensor loss;
    if (way == Way::balanced) {
      loss = criterion(on_all(x), next);
    } else {  // what parallel::DataParallel does
      loss = loss_of(parallel::gather(on_all(x), devices[0]), next);
    }
    autograd::backward(loss);
    if (const auto r = optimizer.step(); !r.applied) log::warn("{}", r.reason);
    result.losses.push_back(loss.item());
  }
  for (const Device device : devices) {
    result.peaks.push_back(core::memory_stats(device).peak_total);
  }
  return result;
}

void print_table(const std::vector<Device>& devices, const Result& gathered,
                 const Result& balanced) {
  std::printf("%-8s %12s %12s\n", "peak of", "gathered", "balanced");
  for (std::size_t i = 0; i < devices.size(); ++i) {
    std::printf("%-8s %12s %12s\n", core::to_string(devices[i]).c_str(),
                support::human_bytes(gathered.peaks[i]).c_str(),
                support::human_bytes(balanced.peaks[i]).c_str());
  }
}

int run(const Flags& flags) {
  if (flags.device == "cpu") {
    setenv("CAIRN_CPU_DEVICES", std::to_string(flags.devices).c_str(), /*overwrite=*/1);
  }
  std::vector<Device> devices;
  devices.reserve(static_cast<std::size_t>(flags.devices));
  for (int i = 0; i < flags.devices; ++i) {
    devices.push_back(Device::parse(flags.device + ":" + std::to_string(i)));
  }
  std::printf("%d sentences of %d words out of %d, on %d devices\n", flags.batch_size, flags.length,
              flags.words, flags.devices);
  const Result gathered = train(flags, devices, Way::gathered);
  const Result balanced = train(flags, devices, Way::balanced);
  for (std::size_t step = 0; step < gathered.losses.size(); ++step) {
    std::printf("step %zu: loss %.5f gathered, %.5f balanced\n", step + 1, gathered.losses[step],
                balanced.losses[step]);
  }
  print_table(devices, gathered, balanced);
  if (!flags.picture.empty()) {
    ::balanced::save_picture(flags.picture, devices, gathered.peaks, balanced.peaks);
    std::printf("wrote %s\n", flags.picture.c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a language model on several devices, with its loss on one and on all",
               "balanced");
  Flags flags;
  flags.add_to(app);
  return support::run_program(app, argc, argv, [&] { return run(flags); });
}
