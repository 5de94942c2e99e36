// Every library of the package, in the few lines that the README shows.
#include <cairn/amp/amp.h>
#include <cairn/autograd/ops.h>
#include <cairn/checkpointing/training_state.h>
#include <cairn/core/generator.h>
#include <cairn/data/samplers.h>
#include <cairn/nn/nn.h>
#include <cairn/observe/run.h>
#include <cairn/optim/adam.h>
#include <cairn/parallel/distributed.h>

#include <iostream>

using namespace cairn;

int main() {
  auto group = parallel::ProcessGroup::from_environment();
  manual_seed(1);
  nn::Sequential model(nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 2));
  optim::FusedAdam optimizer(model.parameters(), {.lr = 0.01});
  amp::Amp precision = amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
  parallel::DistributedDataParallel ddp(model, group);

  Tensor x = Tensor::empty({32, 8});
  Generator(3).fill_normal(x, 0.0, 1.0);
  std::vector<std::int64_t> labels;
  for (int i = 0; i < 32; ++i) labels.push_back(x.data<float>()[i * 8] > 0.0f);
  const Tensor target = Tensor::from(labels, {32});

  observe::Run run("runs/trains");
  double first = 0, last = 0;
  for (int step = 0; step < 100; ++step) {
    const Tensor loss = nn::cross_entropy(ddp(x), target);
    (step == 0 ? first : last) = loss.item();
    precision.backward(loss);
    if (const auto r = precision.step(); !r.applied) std::cerr << r.reason << "\n";
    run.step({{"loss", loss.item()}});
  }
  std::cout << "loss " << first << " -> " << last << "\n";
  return last < first / 4 ? 0 : 1;
}
