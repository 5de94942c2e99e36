// A ConvNet that reads digits.
#include <cstdlib>
#include <iostream>

#include "cairn/libtorch/libtorch.h"
#include "conv_net.h"
#include "digits.h"

using namespace cairn;

int main(int argc, char** argv) {
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200;
  torch::manual_seed(1);
  const digits::Batches batches(1, 6400);
  ConvNet net;
  libtorch::Model model(*net);
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3, .weight_decay = 1e-2});
  auto precision = libtorch::initialize(model, optimizer, {.half_dtype = DType::bf16});
  checkpointing::TrainingState state({{"net", model}, {"adam", optimizer}, {"amp", precision}});
  state.resume_latest("runs/libtorch");

  for (std::int64_t step = state.step(); step < steps; ++step) {
    const digits::Batch batch = batches.batch(step, 64);
    const torch::Tensor y = model.run(net, batch.images);
    const torch::Tensor loss = torch::nll_loss(y, batch.labels);
    precision.backward(loss);
    if (const auto r = precision.step(); !r.applied) std::cerr << r.reason << "\n";
    state.save_every(50, "runs/libtorch");
    if (step % 50 == 0) std::cout << "step " << step << " loss " << loss.item<float>() << std::endl;
  }

  net->eval();
  const torch::NoGradGuard no_grad;
  const digits::Batch test = digits::Batches(2, 1000).batch(0, 1000);
  const torch::Tensor hits = net->forward(test.images).argmax(1) == test.labels;
  std::cout << "accuracy " << hits.to(torch::kFloat).mean().item<float>() << std::endl;
}
