// gpu_recovery: a training that runs out of a GPU's memory, by batches whose graphs are
// kept, and while others hold all of it, and goes on: its weights are those of one that never did.
#include <CLI/CLI.hpp>
#include <iostream>
#include <vector>

#include "cairn/autograd/engine.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "support/flags.h"

namespace {

using namespace cairn;

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr int kSteps = 6;
constexpr std::int64_t kRows = 64, kWidth = 256, kClasses = 10;

struct Trainee {
  Trainee() : model(made()), optimizer(model.parameters(), {.lr = 1e-2}) {}
  static nn::Sequential made() {
    manual_seed(3);
    nn::Sequential model(nn::Linear(kWidth, 2 * kWidth, {.activation = autograd::Activation::relu}),
                         nn::Linear(2 * kWidth, kClasses));
    model.to(kGpu);
    return model;
  }
  /// Of the step's own batch.
  void step(int number) {
    const Tensor host = Tensor::empty({kRows, kWidth}),
                 x = Tensor::empty(host.shape(), DType::f32, kGpu);
    Generator(static_cast<std::uint64_t>(number)).fill_normal(host, 0.0, 1.0);
    kernels::copy(host, x);
    std::vector<std::int64_t> labels;
    for (std::int64_t i = 0; i < kRows; ++i) labels.push_back((i + number) % kClasses);
    const Tensor target = Tensor::from(labels, {kRows}, DType::i64, kGpu);
    autograd::backward(nn::cross_entropy(model(x), target));
    (void)optimizer.step();
  }
  std::vector<double> weights() const {
    std::vector<double> all;
    for (const auto& [name, tensor] : model.parameters()) {
      const auto values = tensor.to_vector();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

  nn::Sequential model;
  optim::FusedAdam optimizer;
};

/// Runs `f`, which must run out of memory; prints the error's first line.
template <class F>
void expect_out_of_memory(const char* what, F&& f) {
  try {
    f();
  } catch (const core::OutOfMemory& error) {
    const std::string text = error.what();
    CAIRN_CHECK(text.find("live blocks") != std::string::npos, "gpu_recovery",
                "expected a report of live blocks, got ", text);
    std::cout << what << ": " << text.substr(0, text.find('\n')) << std::endl;
    return;
  }
  core::fail("gpu_recovery", "expected OutOfMemory of ", what, ", got none");
}

/// All of the GPU's memory, down to pieces of 2 MiB.
std::vector<std::shared_ptr<core::Storage>> take_all() {
  std::vector<std::shared_ptr<core::Storage>> held;
  for (std::size_t bytes = std::size_t{1} << 34; bytes >= std::size_t{2} << 20;) {
    try {
      held.push_back(core::Storage::allocate(bytes, kGpu));
    } catch (const core::OutOfMemory&) {
      bytes /= 2;
    }
  }
  return held;
}

/// Batches whose graphs are kept, until there is no room for one more.
void without_end(Trainee& trainee) {
  const Tensor x = Tensor::zeros({1 << 12, kWidth}, DType::f32, kGpu);
  std::vector<Tensor> kept;
  for (;;) kept.push_back(trainee.model(x));
}

int run() {
  Trainee undisturbed, trainee;
  for (int k = 0; k < kSteps; ++k) undisturbed.step(k);
  for (int k = 0; k < kSteps / 3; ++k) trainee.step(k);
  expect_out_of_memory("batches without end", [&] { without_end(trainee); });
  for (int k = kSteps / 3; k < 2 * kSteps / 3; ++k) trainee.step(k);
  {
    const auto held = take_all();
    expect_out_of_memory("a batch while others hold the memory", [&] { without_end(trainee); });
  }
  core::release_cached_memory(kGpu);
  for (int k = 2 * kSteps / 3; k < kSteps; ++k) trainee.step(k);
  const core::MemoryStats stats = core::memory_stats(kGpu);
  const bool same = trainee.weights() == undisturbed.weights();
  const bool given_back = stats.reserved < std::size_t{256} << 20;
  std::cout << "weights " << (same ? "as if nothing had been" : "differ") << ", "
            << (stats.reserved >> 20) << " MiB reserved after it" << std::endl;
  return same && given_back ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs out of a GPU's memory, and goes on", "gpu_recovery");
  return support::run_program(app, argc, argv, [] { return run(); });
}
