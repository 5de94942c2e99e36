// Trains the GPT with nothing but this folder: one process, f32, AdamW written by hand.
#include <cstdio>
#include <exception>

#include "adamw.h"
#include "flags.h"
#include "gpt.h"
#include "text.h"

namespace {

void train(plain::Flags& flags) {
  const auto steps = static_cast<std::int64_t>(flags.number("--steps", 200));
  const auto rows = static_cast<std::size_t>(flags.number("--batch", 8));
  flags.end();

  const plain::Sizes sizes{.vocabulary = plain::Text::kVocabulary};
  const plain::Text text(sizes.tokens);
  plain::Gpt<float> model(sizes, 1);
  plain::AdamW optimizer(model.weights.size(), 1e-2f, 0.01f);

  for (std::int64_t step = 0; step < steps; ++step) {
    const plain::Batch batch = text.batch(step, 0, rows);
    const float loss = model.forward(batch.inputs, batch.targets);
    model.backward();
    optimizer.step(model.weights, model.gradients);
    std::printf("step %d loss %.6f\n", static_cast<int>(step + 1), loss);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    plain::Flags flags(argc, argv);
    train(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plain_gpt: %s\n", error.what());
    return 1;
  }
}
