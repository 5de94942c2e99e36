// A ConvNet that reads digits.
#include <torch/optim.h>

#include <cstdlib>
#include <iostream>

#include "conv_net.h"
#include "digits.h"

int main(int argc, char** argv) {
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200;
  torch::manual_seed(1);
  const digits::Batches batches(1, 6400);
  ConvNet net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));

  for (std::int64_t step = 0; step < steps; ++step) {
    const digits::Batch batch = batches.batch(step, 64);
    const torch::Tensor y = net->forward(batch.images);
    const torch::Tensor loss = torch::nll_loss(y, batch.labels);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 50 == 0) std::cout << "step " << step << " loss " << loss.item<float>() << std::endl;
  }

  net->eval();
  const torch::NoGradGuard no_grad;
  const digits::Batch test = digits::Batches(2, 1000).batch(0, 1000);
  const torch::Tensor hits = net->forward(test.images).argmax(1) == test.labels;
  std::cout << "accuracy " << hits.to(torch::kFloat).mean().item<float>() << std::endl;
}
