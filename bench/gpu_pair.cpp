// What a machine with two GPUs or more can show.
//
//   cairn-run --nproc-per-node 2 gpu_pair bandwidth   NCCL's collectives by size; bus bandwidth by
//                                                     the formula of nccl-tests
//   cairn-run --nproc-per-node 2 gpu_pair overlap     how much of a step's all_reduces backward
//                                                     hides
//   gpu_pair copies                                   cuda:0 to cuda:1, directly and through the
//                                                     host
//
// One JSON line a figure, by rank 0.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cairn/autograd/engine.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/peers.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/distributed.h"
#include "support/flags.h"

namespace {

using namespace cairn;
using Run = std::function<void()>;

/// Milliseconds of a run, the median of several; of all ranks the slowest's.
double milliseconds(const Run& run, Device device, int repeats,
                    const parallel::ProcessGroup& group) {
  std::vector<double> times;
  for (int turn = 0; turn < 4; ++turn) {  // the first makes what lasts
    core::Stream::current(device).synchronize();
    group.barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) run();
    core::Stream::current(device).synchronize();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (turn > 0) times.push_back(group.all_reduce_max(took.count() / repeats, "time"));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Operation {
  const char* name;
  double factor;  // of nccl-tests: bytes on the bus over bytes of the whole tensor
  std::function<void(const Tensor& whole, const Tensor& part)> run;
};

int bandwidth(bool tiny) {
  const auto group = parallel::ProcessGroup::from_environment();
  const auto n = static_cast<double>(group.world_size());
  CAIRN_CHECK(n > 1, "gpu_pair", "expected several ranks (cairn-run), got one");
  const Device device = group.device("cuda");
  const Operation operations[] = {
      {"all_reduce", 2 * (n - 1) / n, [&](auto& whole, auto&) { group.all_reduce(whole); }},
      {"all_gather", (n - 1) / n, [&](auto& whole, auto& part) { group.all_gather(part, whole); }},
      {"reduce_scatter", (n - 1) / n,
       [&](auto& whole, auto& part) { group.reduce_scatter(whole, part); }}};
  for (const Operation& operation : operations) {
    for (std::int64_t bytes = 8 << 10; bytes <= (tiny ? 64 << 10 : 1 << 30); bytes *= 8) {
      const std::int64_t elements = bytes / 4 / group.world_size() * group.world_size();
      const Tensor whole = Tensor::zeros({elements}, DType::f32, device);
      const Tensor part = Tensor::zeros({elements / group.world_size()}, DType::f32, device);
      const double ms =
          milliseconds([&] { operation.run(whole, part); }, device, tiny ? 1 : 20, group);
      if (group.rank() > 0) continue;
      const double gigabytes = static_cast<double>(4 * elements) / 1e9;
      std::cout << nlohmann::json{{"figure", operation.name},
                                  {"bytes", 4 * elements},
                                  {"ms", ms},
                                  {"bus_gb_s", gigabytes / ms * 1e3 * operation.factor}}
                << std::endl;
    }
  }
  return 0;
}

/// A step of layers as wide as a GPT's on a rank's own batch; with DDP or alone.
struct Training {
  Training(const parallel::ProcessGroup& group, Device device, std::int64_t width,
           std::optional<parallel::DistributedOptions> options)
      : model(made(device, width)), x(Tensor::empty({2 * width, width}, DType::f32, device)) {
    if (options) ddp.emplace(model, group, *options);
    optimizer.emplace(model.parameters(), optim::AdamOptions{.lr = 1e-4});
    const Tensor host = Tensor::empty(x.shape());
    Generator(1 + static_cast<std::uint64_t>(group.rank())).fill_normal(host, 0.0, 1.0);
    kernels::copy(host, x);
  }
  static nn::Sequential made(Device device, std::int64_t width) {
    const core::DefaultDeviceGuard host(Device{});
    nn::Sequential model;
    for (int i = 0; i < 12; ++i) model.add(nn::Linear(width, width));
    model.to(device);
    return model;
  }
  void step() {
    const Tensor y = ddp ? (*ddp)(x) : model(x);
    autograd::backward(autograd::mean(autograd::mul(y, y)));
    (void)optimizer->step({.check = false});
  }

  nn::Sequential model;
  std::optional<parallel::DistributedDataParallel> ddp;
  std::optional<optim::FusedAdam> optimizer;
  Tensor x;
};

int overlap(bool tiny) {
  const auto group = parallel::ProcessGroup::from_environment();
  CAIRN_CHECK(group.world_size() > 1, "gpu_pair", "expected several ranks (cairn-run), got one");
  const Device device = group.device("cuda");
  const std::int64_t width = tiny ? 16 : 2048;
  const int repeats = tiny ? 1 : 10;
  const auto time = [&](std::optional<parallel::DistributedOptions> options) {
    Training training(group, device, width, std::move(options));
    return milliseconds([&] { training.step(); }, device, repeats, group);
  };
  const double alone = time(std::nullopt), overlapped = time(parallel::DistributedOptions{}),
               after = time(parallel::DistributedOptions{.delay_allreduce = true});
  if (group.rank() > 0) return 0;
  std::cout << nlohmann::json{{"figure", "overlap"},
                              {"alone_ms", alone},
                              {"ms", overlapped},
                              {"delayed_ms", after},
                              {"hidden", (after - overlapped) / std::max(after - alone, 1e-9)}}
            << std::endl;
  return 0;
}

int copies(bool tiny) {
  CAIRN_CHECK(core::device_count(DeviceType::cuda) > 1, "gpu_pair", "expected two GPUs, got ",
              core::device_count(DeviceType::cuda));
  const Device one{DeviceType::cuda, 0}, other{DeviceType::cuda, 1};
  const std::int64_t bytes = tiny ? 1 << 16 : 1 << 28;
  const Tensor from = Tensor::full({bytes}, 7, DType::u8, one),
               to = Tensor::zeros({bytes}, DType::u8, other);
  const auto pinned = core::Storage::allocate_pinned(static_cast<std::size_t>(bytes));
  const TensorView host(pinned->data(), {bytes}, DType::u8, Device{});
  const auto group = parallel::ProcessGroup::single();
  const auto say = [&](const char* figure, const Run& run) {
    const double ms = milliseconds(run, other, tiny ? 1 : 10, group);
    std::cout << nlohmann::json{{"figure", figure},
                                {"ms", ms},
                                {"gb_s", static_cast<double>(bytes) / ms / 1e6}}
              << std::endl;
  };
  say("copy between GPUs", [&] { kernels::copy(from, to); });
  const bool whole = to.to_vector<std::uint8_t>() == from.to_vector<std::uint8_t>();
  say("copy through the host", [&] {
    core::copy_bytes(from, host);
    core::Stream::current(one).synchronize();
    core::copy_bytes(host, to);
  });
  return whole ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What two GPUs can show", "gpu_pair");
  std::string what;
  bool tiny = false;
  app.add_option("what", what, "bandwidth, overlap or copies")
      ->required()
      ->check(CLI::IsMember({"bandwidth", "overlap", "copies"}));
  app.add_flag("--tiny", tiny, "sizes for simulated GPUs; their times mean nothing");
  return support::run_program(app, argc, argv, [&] {
    return what == "bandwidth" ? bandwidth(tiny) : what == "overlap" ? overlap(tiny) : copies(tiny);
  });
}
