// What a machine with one GPU can show of several ranks.
//
//   cairn-run --nproc-per-node 2 gpu_ranks staged   ranks that share cuda:0: gradients go through
//                                                   the host and Gloo; trains as one process does
//   gpu_ranks nccl                                  NCCL's collectives in a group of one rank
//
// NCCL refuses two ranks on one GPU, so that its messages between GPUs need a machine with two.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iostream>

#include "cairn/autograd/engine.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/process_group.h"
#include "collectives/nccl_backend.h"
#include "store/store.h"
#include "support/flags.h"

namespace {

using namespace cairn;

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr int kSteps = 20;
constexpr std::int64_t kRows = 16, kInputs = 24, kClasses = 10;  // rows of each rank

struct Trainee {
  Trainee() : model(made()), optimizer(model.parameters(), {.lr = 1e-2}) {}

  static nn::Sequential made() {
    manual_seed(3);
    nn::Sequential model(nn::Linear(kInputs, 48, {.activation = autograd::Activation::relu}),
                         nn::Linear(48, kClasses));
    model.to(kGpu);
    return model;
  }
  void backward(const Tensor& x, const Tensor& target) {
    autograd::backward(nn::cross_entropy(model(x), target));
  }

  nn::Sequential model;
  optim::FusedAdam optimizer;
};

/// One batch of all ranks' rows.
struct Batch {
  explicit Batch(std::int64_t rows) : x(Tensor::empty({rows, kInputs})) {
    Generator(5).fill_normal(x, 0.0, 1.0);
    std::vector<std::int64_t> labels;
    for (std::int64_t i = 0; i < rows; ++i) labels.push_back(i * 7919 % kClasses);
    target = Tensor::from(labels, {rows});
  }
  static Tensor on_gpu(const Tensor& all, std::int64_t begin, std::int64_t end) {
    const TensorView rows = all.view().slice(0, begin, end);
    Tensor there = Tensor::empty(rows.shape, rows.dtype, kGpu);
    kernels::copy(rows, there);
    return there;
  }
  Tensor x, target;
};

/// The mean over the ranks, by way of the host: Gloo knows CPU tensors only.
void average_staged(const parallel::ProcessGroup& group, const optim::Optimizer& optimizer) {
  const Tensor& first = optimizer.groups().front().parameters.front().tensor;
  const auto arena = optim::GradientArena::of(first);
  for (const auto& buffer : arena->buffers()) {
    const Tensor host = Tensor::empty(buffer.data.shape(), buffer.data.dtype(), Device{});
    kernels::copy(buffer.data, host);
    group.all_reduce(host, parallel::ReduceOp::mean, "staged gradients");
    kernels::copy(host, buffer.data);
  }
}

double largest_difference(nn::Module& a, nn::Module& b) {
  double most = 0;
  const NamedTensors first = a.parameters(), second = b.parameters();
  for (std::size_t i = 0; i < first.size(); ++i) {
    const auto x = first[i].tensor.to_vector(), y = second[i].tensor.to_vector();
    for (std::size_t k = 0; k < x.size(); ++k) {
      const double difference = std::abs(x[k] - y[k]);
      if (!(difference <= most)) most = difference;  // NaN stays
    }
  }
  return most;
}

int staged() {
  const auto group = parallel::ProcessGroup::from_environment();
  CAIRN_CHECK(group.world_size() > 1, "gpu_ranks", "expected several ranks (cairn-run), got one");
  const std::int64_t begin = group.rank() * kRows, all = group.world_size() * kRows;
  const Batch batch(all);
  Trainee shared, alone;
  for (int step = 0; step < kSteps; ++step) {
    shared.backward(Batch::on_gpu(batch.x, begin, begin + kRows),
                    Batch::on_gpu(batch.target, begin, begin + kRows));
    average_staged(group, shared.optimizer);
    (void)shared.optimizer.step();
    alone.backward(Batch::on_gpu(batch.x, 0, all), Batch::on_gpu(batch.target, 0, all));
    (void)alone.optimizer.step();
  }
  const double difference =
      group.all_reduce_max(largest_difference(shared.model, alone.model), "difference");
  if (group.rank() == 0)
    std::cout << group.world_size() << " ranks on cuda:0, " << kSteps
              << " steps: largest difference from one process " << difference << std::endl;
  return difference < 1e-3 ? 0 : 1;  // Adam divides small gradients by themselves
}

Tensor numbers(DType dtype) {
  const Tensor host = Tensor::empty({1000}), x = Tensor::empty({1000}, dtype, kGpu);
  Generator(1).fill_normal(host, 0.0, 1.0);
  kernels::copy(host, x);
  return x;
}

/// With one rank every collective is the identity.
bool keeps(parallel::Collectives& nccl, DType dtype) {
  const Tensor x = numbers(dtype), y = Tensor::zeros({1000}, dtype, kGpu);
  const auto before = x.to_vector();
  std::uint64_t number = 0;
  const auto next = [&] {
    nccl.begin({.sequence = ++number, .what = [] { return "collective of one rank"; }});
  };
  next(), nccl.all_reduce(x, parallel::ReduceOp::sum);
  next(), nccl.all_reduce(x, parallel::ReduceOp::mean);
  next(), nccl.broadcast(x, 0);
  next(), nccl.all_gather(x, y, {1000});
  nccl.wait();
  return x.to_vector() == before && y.to_vector() == before;
}

int nccl() {
  using std::chrono::seconds;
  parallel::StoreServer server({"127.0.0.1", 0, ""}, 1);
  const auto client = std::make_shared<parallel::StoreClient>(
      parallel::StoreAddress{"127.0.0.1", server.port(), ""}, 0);
  const auto group = parallel::connect_nccl({0, 1, kGpu, "127.0.0.1", client, seconds(30)});
  bool all_kept = true;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const bool kept = keeps(*group, dtype);
    std::cout << dtype << ": " << (kept ? "unchanged" : "changed") << std::endl;
    all_kept = all_kept && kept;
  }
  group->close();
  return all_kept ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What one GPU can show of several ranks", "gpu_ranks");
  std::string what;
  app.add_option("what", what, "staged or nccl")
      ->required()
      ->check(CLI::IsMember({"staged", "nccl"}));
  return support::run_program(app, argc, argv, [&] { return what == "nccl" ? nccl() : staged(); });
}
