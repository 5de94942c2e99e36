// The C++ side of scripts/bench_libtorch. Prints a JSON line: median and fastest milliseconds of a
// repeat, or bytes.
//
//   libtorch_steps update cairn|checked|torch    AdamW on GPT-2's 124M parameters in 148 tensors,
//                                                f32; checked: gradients are looked through first,
//                                                as step() does unless told otherwise
//   libtorch_steps step cairn|torch NET STEPS    a training step at O0, both with
//                                                torch::optim::AdamW's rule; NET: convnet, resnet
//   libtorch_steps ranks convnet STEPS           the convnet's step of RANK of WORLD_SIZE
//   libtorch_steps recompute STEPS               forward and backward of 12 blocks, each recomputed
//   libtorch_steps memory NET O0|O2              what three steps take at their peak; NET: wide
//                                                (weights), tall (activations)
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "07_libtorch/conv_net.h"
#include "cairn/core/log.h"
#include "cairn/libtorch/libtorch.h"

namespace {

using namespace cairn;

struct Times {
  double ms, fastest_ms;
};

Times times(const std::function<void()>& run, int repeats) {
  std::vector<double> taken;
  for (int i = -2; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::milli> one = std::chrono::steady_clock::now() - begin;
    if (i >= 0) taken.push_back(one.count());
  }
  std::sort(taken.begin(), taken.end());
  return {taken[taken.size() / 2], taken[0]};
}

// ---- Updates

struct Gpt2Weights : torch::nn::Module {
  Gpt2Weights() {
    const std::int64_t d = 768;
    add({50257, d}), add({1024, d});
    for (int block = 0; block < 12; ++block) {
      add({d}), add({d}), add({3 * d, d}), add({3 * d}), add({d, d}), add({d});
      add({d}), add({d}), add({4 * d, d}), add({4 * d}), add({d, 4 * d}), add({d});
    }
    add({d}), add({d});
  }
  void add(at::IntArrayRef shape) {
    register_parameter(std::to_string(count++), torch::randn(shape));
  }
  int count = 0;
};

Times update_of_torch() {
  Gpt2Weights weights;
  for (auto& x : weights.parameters()) x.mutable_grad() = torch::randn(x.sizes());
  torch::optim::AdamW optimizer(weights.parameters(), torch::optim::AdamWOptions(1e-3));
  return times([&] { optimizer.step(); }, 5);
}

Times update_of_cairn(bool check) {
  Gpt2Weights weights;
  libtorch::Model model(weights);
  optim::FusedAdam optimizer(model.parameters(), {.weight_decay = 0.01});
  for (const auto& [name, tensor] : model.parameters()) {
    libtorch::to_torch(tensor.gradient_slot().memory()).normal_();
    tensor.gradient_slot().mark_written();
  }
  return times([&] { (void)optimizer.step({.check = check, .keep_gradients = true}); }, 15);
}

// ---- Steps

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t in, std::int64_t out, int stride)
      : conv1(register_module("conv1", conv(in, out, 3, stride))),
        conv2(register_module("conv2", conv(out, out, 3, 1))),
        norm1(register_module("norm1", torch::nn::BatchNorm2d(out))),
        norm2(register_module("norm2", torch::nn::BatchNorm2d(out))) {
    if (in == out && stride == 1) return;
    shortcut->push_back(conv(in, out, 1, stride));
    shortcut->push_back(torch::nn::BatchNorm2d(out));
    register_module("shortcut", shortcut);
  }
  static torch::nn::Conv2d conv(std::int64_t in, std::int64_t out, int size, int stride) {
    return torch::nn::Conv2d(
        torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto beside = shortcut->is_empty() ? x : shortcut->forward(x);
    return torch::relu(norm2(conv2(torch::relu(norm1(conv1(x))))) + beside);
  }
  torch::nn::Conv2d conv1, conv2;
  torch::nn::BatchNorm2d norm1, norm2;
  torch::nn::Sequential shortcut;
};
TORCH_MODULE(Block);

struct ResNet18Impl : torch::nn::Module {
  ResNet18Impl() {
    body->push_back(BlockImpl::conv(3, 64, 3, 1));
    body->push_back(torch::nn::BatchNorm2d(64));
    body->push_back(torch::nn::ReLU());
    std::int64_t in = 64;
    for (const std::int64_t out : {64, 128, 256, 512}) {
      body->push_back(Block(in, out, out == 64 ? 1 : 2));
      body->push_back(Block(out, out, 1));
      in = out;
    }
    register_module("body", body);
    fc = register_module("fc", torch::nn::Linear(512, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::log_softmax(fc(body->forward(x).mean({2, 3})), 1);
  }
  torch::nn::Sequential body;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet18);

/// As Python's to(memory_format=...). contiguous() would leave a tensor of one channel as it is,
/// and what is made of it in the other order.
void to_order(torch::nn::Module& net, at::MemoryFormat order) {
  for (auto& x : net.parameters()) {
    if (x.dim() == 4) x.set_data(x.clone(order));
  }
}

template <class Net>
Times step_of(Net net, const torch::Tensor& images, const std::string& whose, int steps,
              const parallel::ProcessGroup& group = parallel::ProcessGroup::single(),
              at::MemoryFormat order = at::MemoryFormat::ChannelsLast) {
  to_order(*net, order);
  const auto x = images.clone(order);
  const auto y = torch::arange(x.size(0)) % 10;
  if (whose == "torch") {
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    return times(
        [&] {
          optimizer.zero_grad();
          torch::nll_loss(net->forward(x), y).backward();
          optimizer.step();
        },
        steps);
  }
  libtorch::Model model(*net, group);
  optim::FusedAdam optimizer(model.parameters(), {.weight_decay = 0.01});
  auto precision = libtorch::initialize(model, optimizer,
                                        {.opt_level = amp::OptLevel::O0, .world = model.world()});
  return times(
      [&] {
        precision.backward(torch::nll_loss(model.run(net, x), y));
        (void)precision.step();
      },
      steps);
}

Times step(const std::string& whose, const std::string& net, int steps) {
  if (net == "resnet") return step_of(ResNet18(), torch::randn({32, 3, 32, 32}), whose, steps);
  return step_of(ConvNet(), torch::randn({100, 1, 28, 28}), whose, steps);
}

/// In the better of the two storage orders, as PyTorch's side.
Times step_of_ranks(int steps, const parallel::ProcessGroup& group) {
  const auto in = [&](at::MemoryFormat order) {
    return step_of(ConvNet(), torch::randn({100, 1, 28, 28}), "cairn", steps, group, order);
  };
  const Times last = in(at::MemoryFormat::ChannelsLast), first = in(at::MemoryFormat::Contiguous);
  return last.ms < first.ms ? last : first;
}

Times recompute(int steps) {
  constexpr int kBlocks = 12;
  std::vector<torch::nn::Sequential> blocks;
  for (int i = 0; i < kBlocks; ++i) {
    blocks.push_back(torch::nn::Sequential(torch::nn::Linear(512, 2048), torch::nn::GELU(),
                                           torch::nn::Linear(2048, 512)));
  }
  const auto x = torch::randn({256, 512});
  return times(
      [&] {
        auto h = x;
        for (auto& block : blocks) {
          h = libtorch::checkpoint([&](const torch::Tensor& in) { return block->forward(in); }, h);
        }
        h.sum().backward();
        for (auto& block : blocks) block->zero_grad();
      },
      steps);
}

/// MB: the process's peak, beyond what it was before there was a model. Layers of `width`, so
/// narrow for activations that products in bf16, which libtorch does slowly where the processor
/// does not, take seconds.
double memory(std::int64_t layers, std::int64_t width, std::int64_t rows,
              const std::string& level) {
  const auto peak = [] {
    std::ifstream status("/proc/self/status");
    std::string word;
    while (status >> word && word != "VmHWM:") {
    }
    double kib = 0;
    status >> kib;
    return kib * 1024;
  };
  const double before = peak();
  torch::nn::Sequential net;
  for (std::int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  libtorch::Model model(*net);
  optim::FusedAdam optimizer(model.parameters());
  auto precision = libtorch::initialize(
      model, optimizer, {.opt_level = amp::parse_opt_level(level), .half_dtype = DType::bf16});
  const auto x = torch::randn({rows, width});
  for (int i = 0; i < 3; ++i) {
    precision.backward(model.run(net, x).square().mean());
    (void)precision.step();
  }
  return (peak() - before) / 1e6;
}

void print(const Times& found) {
  std::cout << "{\"ms\": " << found.ms << ", \"fastest_ms\": " << found.fastest_ms << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto word = [&](std::size_t i) { return i < words.size() ? words[i] : std::string(); };
  const auto number = [&](std::size_t i) { return std::max(1, std::atoi(word(i).c_str())); };
  torch::manual_seed(1);
  if (word(0) == "update") {
    print(word(1) == "torch" ? update_of_torch() : update_of_cairn(word(1) == "checked"));
  } else if (word(0) == "step") {
    print(step(word(1), word(2), number(3)));
  } else if (word(0) == "ranks") {
    torch::set_num_threads(1);
    const auto group = parallel::ProcessGroup::from_environment();
    const Times found = step_of_ranks(number(2), group);
    group.barrier();
    if (group.rank() == 0) print(found);
  } else if (word(0) == "recompute") {
    print(recompute(number(1)));
  } else if (word(0) == "memory") {
    const double megabytes =
        word(1) == "wide" ? memory(16, 2048, 16, word(2)) : memory(64, 64, 16384, word(2));
    print({megabytes, megabytes});
  } else {
    std::cerr << "libtorch_steps: expected update, step, ranks, recompute or memory\n";
    return 1;
  }
}
