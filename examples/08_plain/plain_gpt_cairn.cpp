// Trains the same GPT with Cairn: weights and gradients of a half type, several processes, state
// files. The arrays, the forward and the backward stay the trainer's own.
#include <cairn/amp/scaled_step.h>
#include <cairn/checkpointing/parts.h>
#include <cairn/checkpointing/training_state.h>
#include <cairn/core/log.h>
#include <cairn/optim/adam.h>
#include <cairn/parallel/reducer.h>

#include <cstdio>
#include <exception>

#include "flags.h"
#include "gpt.h"
#include "text.h"

namespace {

using namespace cairn;

template <class Real>
void train(plain::Flags& flags, const parallel::ProcessGroup& group) {
  const auto steps = static_cast<std::int64_t>(flags.number("--steps", 200));
  const auto rows = static_cast<std::size_t>(flags.number("--batch", 8));
  const auto save_every = static_cast<std::int64_t>(flags.number("--save-every", 10));
  const std::string folder = flags.text("--checkpoint-dir", "");
  const double loss_scale = flags.number("--loss-scale", 65536.0);
  flags.end();

  const plain::Sizes sizes{.vocabulary = plain::Text::kVocabulary};
  const plain::Text text(sizes.tokens);
  plain::Gpt<Real> model(sizes, 1);
  NamedTensors parameters, gradients;
  for (const auto& [name, shape, begin, size] : model.parameters) {
    const Shape dims(shape.begin(), shape.end());
    gradients.push_back({name, Tensor::wrap(model.gradients, dims, begin)});
    parameters.push_back(optim::wrap_parameter(name, Tensor::wrap(model.weights, dims, begin),
                                               gradients.back().tensor));
  }
  parallel::Reducer reducer(group);
  reducer.register_gradients(gradients);
  optim::FusedAdam optimizer(parameters, {.lr = 1e-2, .weight_decay = 0.01});
  amp::ScaledStep scaled(optimizer, {.init_scale = loss_scale}, reducer.world());
  checkpointing::Tensors weights(parameters);
  checkpointing::TrainingState state(
      {{"model", weights}, {"optimizer", optimizer}, {"amp", scaled}, {"reducer", reducer}},
      reducer.world());
  state.resume_latest(folder);
  const std::size_t own = rows / static_cast<std::size_t>(group.world_size());

  while (state.step() < steps) {
    const plain::Batch batch =
        text.batch(state.step(), own * static_cast<std::size_t>(group.rank()), own);
    const float loss = model.forward(batch.inputs, batch.targets);
    model.backward(static_cast<float>(scaled.scale()),
                   [&](std::size_t i) { reducer.mark_ready(i); });
    reducer.wait();
    const optim::StepResult result = scaled.step({.max_gradient_norm = 1.0});
    if (!result.applied && group.rank() == 0) log::warn("{}", result.reason);
    state.save_every(save_every, folder);
    const double mean = reducer.world().sum(loss, "loss") / group.world_size();
    if (group.rank() == 0) std::printf("step %d loss %.6f\n", static_cast<int>(state.step()), mean);
  }
}

void train_in(const std::string& dtype, plain::Flags& flags, const parallel::ProcessGroup& group) {
  if (dtype == "f32") return train<float>(flags, group);
  if (dtype == "f16") return train<core::Half>(flags, group);
  if (dtype == "bf16") return train<core::BFloat16>(flags, group);
  throw std::invalid_argument("expected --dtype f32, f16 or bf16, got " + dtype);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    plain::Flags flags(argc, argv);
    const std::string dtype = flags.text("--dtype", "bf16");
    const auto group = parallel::ProcessGroup::from_environment();
    group.run([&] { train_in(dtype, flags, group); });  // where it throws, the others learn why
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plain_gpt_cairn: %s\n", error.what());
    return 1;
  }
}
