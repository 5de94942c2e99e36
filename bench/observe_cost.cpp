// What an observe::Run costs of a training step, all of it on: spans, values, memory, every file.
//
//   observe_cost [SECONDS]     of each measurement; 10
//
// Telling and writing take some microseconds of a step's milliseconds, less than steps differ from
// each other: so both are measured for themselves, as processor time of all threads. A training
// with nothing told; then the same telling at the same pace, with sleep in place of the training.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/observe/run.h"
#include "cairn/optim/adam.h"
#include "support/conv_net.h"
#include "support/gpt.h"

namespace {

using namespace cairn;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

struct Cost {
  double wall = 0, processor = 0;  // seconds a call
};

Cost cost_of(double seconds, const std::function<void()>& call) {
  const double wall = seconds_now(), processor = processor_seconds();
  int calls = 0;
  for (; seconds_now() < wall + seconds; ++calls) call();
  return {(seconds_now() - wall) / calls, (processor_seconds() - processor) / calls};
}

/// A step as the examples tell it: five spans and six values.
void tell(observe::Run& run) {
  observe::Span part(run, "data");
  for (const char* next : {"forward", "backward", "update", "save"}) part.next(next);
  run.step({{"loss", 0.5},
            {"accuracy", 0.9},
            {"lr", 1e-3},
            {"loss_scale", 65536},
            {"gradient_norm", 0.1},
            {"images_per_second", 1e4}});
}

void compare(const char* name, double seconds, const std::function<void()>& step) {
  for (int i = 0; i < 5; ++i) step();
  const Cost training = cost_of(seconds, step);
  const auto folder = std::filesystem::temp_directory_path() / "cairn_observe_cost";
  const auto pause = [&] {
    std::this_thread::sleep_for(std::chrono::duration<double>(training.wall));
  };
  const Cost sleep = cost_of(seconds / 4, pause);
  Cost paced, told;
  {
    observe::Run run(folder.string());
    for (int i = 0; i < 2000; ++i) {  // curves as long as they get
      tell(run);
      if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));  // all of it is written
    paced = cost_of(seconds, [&] {
      tell(run);
      pause();
    });
    told = cost_of(0.01, [&] { tell(run); });
  }
  const double observed = paced.processor - sleep.processor;
  std::filesystem::remove_all(folder);
  std::printf(
      "%-8s step %8.2f ms of processor time; telling and writing it %6.1f us: %.2f %%; "
      "its thread waits for %.2f us\n",
      name, 1e3 * training.processor, 1e6 * observed, 100 * observed / training.processor,
      1e6 * told.wall);
}

/// A training step at O2 in bf16 on a fixed batch.
template <class Model>
void compare(const char* name, double seconds, Model model, const Tensor& x, const Tensor& labels) {
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
  amp::Amp precision = amp::initialize(model, optimizer,
                                       {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16});
  compare(name, seconds, [&] {
    precision.backward(nn::cross_entropy(model(x), labels));
    (void)precision.step();
  });
}

Tensor tokens(const Shape& shape) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i) values.push_back(i * 7919 % 256);
  return Tensor::from(values, shape, DType::i64);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  manual_seed(1);
  Tensor images = Tensor::empty({50, 1, 28, 28});
  Generator(1).fill_normal(images, 0.0, 1.0);
  std::vector<std::int64_t> digits;
  for (std::int64_t i = 0; i < 50; ++i) digits.push_back(i % 10);
  compare("ConvNet", seconds, support::conv_net(), images, Tensor::from(digits, {50}));
  const Tensor text = tokens({16, 128});
  compare("GPT", seconds, support::Gpt({.vocabulary = 256, .tokens = 128}), text, text);
}
