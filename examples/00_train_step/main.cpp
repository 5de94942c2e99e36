// Trains a small net on drawn digits: half model, f32 master weights, dynamic loss scale.
#include <cairn/amp/amp.h>
#include <cairn/core/generator.h>
#include <cairn/data/drawn_digits.h>
#include <cairn/data/loader.h>
#include <cairn/nn/nn.h>
#include <cairn/optim/adam.h>

#include <iostream>

using namespace cairn;

int main() {
  manual_seed(1);
  nn::Sequential model(nn::Conv2d(1, 16, 5, {.padding = 2}), nn::BatchNorm2d(16, {.relu = true}),
                       nn::MaxPool2d(4), nn::Flatten(), nn::Linear(16 * 7 * 7, 10));
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
  amp::Amp precision =
      amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2, .half_dtype = DType::f16});

  data::DrawnDigits digits(/*seed=*/1, /*count=*/6000);  // needs no download
  data::RandomSampler sampler(digits.size(), /*seed=*/1);
  data::DataLoader loader(digits, sampler, {.batch_size = 50, .normalize = data::Normalize{}});

  int step = 0;
  for (const data::Batch& batch : loader) {
    const Tensor loss = nn::cross_entropy(model(batch.inputs), batch.labels);
    precision.backward(loss);
    if (const optim::StepResult result = precision.step(); !result.applied)
      std::cerr << "skipped: " << result.reason << "\n";
    if (step % 20 == 0) std::cout << "step " << step << "  loss " << loss.item() << "\n";
    ++step;
  }
}
