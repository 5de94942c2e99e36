// A DCGAN of digits.
#include <torch/optim.h>

#include <cstdlib>
#include <iostream>

#include "cairn/libtorch/libtorch.h"
#include "dcgan.h"
#include "digits.h"

int main(int argc, char** argv) {
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200;
  torch::manual_seed(1);
  const digits::Batches batches(1, 3200);
  torch::nn::Sequential g = dcgan::generator(32, 16), d = dcgan::discriminator(16);
  const auto options = torch::optim::AdamWOptions(2e-4).betas({0.5, 0.999});
  torch::optim::AdamW g_optimizer(g->parameters(), options);
  torch::optim::AdamW d_optimizer(d->parameters(), options);
  cairn::libtorch::Model g_model(*g), d_model(*d);
  cairn::libtorch::TorchOptimizer g_step(g_model, g_optimizer), d_step(d_model, d_optimizer);
  auto precision = cairn::libtorch::initialize({&g_model, &d_model}, {&g_step, &d_step});
  const auto make = [&](const torch::Tensor& z) { return g_model.run(g, z); };
  const auto judge = [&](const torch::Tensor& x) { return d_model.run(d, x); };

  for (std::int64_t step = 0; step < steps; ++step) {
    const torch::Tensor real = batches.batch(step, 32).images;
    const torch::Tensor fake = make(torch::randn({32, 32, 1, 1}));

    d_step.clear_grad();
    const auto seen = dcgan::not_real(judge(real)) + dcgan::not_fake(judge(fake.detach()));
    precision.backward(seen, {.optimizers = {&d_step}});
    if (const auto r = precision.step(d_step); !r.applied) std::cerr << r.reason << "\n";

    g_step.clear_grad();
    const torch::Tensor fooled = dcgan::not_real(judge(fake));
    precision.backward(fooled, {.optimizers = {&g_step}});
    if (const auto r = precision.step(g_step); !r.applied) std::cerr << r.reason << "\n";
    if (step % 20 == 0) {
      std::cout << "step " << step << " d " << seen.item<float>() << " g " << fooled.item<float>()
                << std::endl;
    }
  }
}
