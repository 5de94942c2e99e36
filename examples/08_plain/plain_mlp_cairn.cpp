// Trains the same MLP with Cairn: bf16 or f32, the optimizer's state divided among the ranks, state
// files. The arrays, the kernels, the stream and the communicator stay the trainer's own.
#include <cairn/amp/scaled_step.h>
#include <cairn/checkpointing/parts.h>
#include <cairn/checkpointing/training_state.h>
#include <cairn/core/stream.h>
#include <cairn/optim/adam.h>
#include <cairn/parallel/reducer.h>
#include <cairn/parallel/sharded_states.h>

#include <cstdio>
#include <exception>

#include "flags.h"
#include "mlp.h"

namespace {

using namespace cairn;

template <class Real>
void train(plain::Flags& flags, const plain::Rank& me, const parallel::ProcessGroup& group) {
  const auto steps = static_cast<std::int64_t>(flags.number("--steps", 100));
  const auto save_every = static_cast<std::int64_t>(flags.number("--save-every", 10));
  const std::string folder = flags.text("--checkpoint-dir", "");
  flags.end();

  const plain::MlpSizes sizes;
  const plain::Text text(sizes.tokens);
  plain::Mlp<Real> model(sizes, 1, me.stream);
  const Shape size = {static_cast<std::int64_t>(model.layout.size)};
  const TensorView weights(model.weights.data, size, core::dtype_of<Real>, group.device());
  const TensorView gradients(model.gradients.data, size, core::dtype_of<Real>, group.device());
  const NamedTensors parameters = {optim::wrap_parameter("all", weights, gradients)};
  parallel::Reducer reducer(group);
  reducer.register_gradients({"all"}, {gradients});
  parallel::ShardedOptimizerStates sharded(group, parameters);
  optim::FusedAdam optimizer(parameters, {.lr = 1e-2, .weight_decay = 0.01});
  amp::ScaledStep scaled(optimizer, {.init_scale = 1.0}, reducer.world());
  checkpointing::Tensors tensors(parameters);
  checkpointing::TrainingState state(
      {{"model", tensors}, {"optimizer", optimizer}, {"amp", scaled}}, reducer.world());
  state.resume_latest(folder);

  while (state.step() < steps) {
    const plain::Batch batch =
        text.batch(state.step(), static_cast<std::size_t>(me.rank) * sizes.rows, sizes.rows);
    const float loss = model.forward_backward(batch, static_cast<float>(scaled.scale()));
    reducer.mark_ready(0);
    reducer.wait();
    const optim::StepResult result = scaled.step();
    if (!result.applied) std::fprintf(stderr, "%s\n", result.reason.c_str());
    state.save_every(save_every, folder);
    std::printf("rank %d step %d loss %.6f\n", me.rank, static_cast<int>(state.step()), loss);
  }
}

void train_in(const std::string& dtype, plain::Flags& flags, const plain::Rank& me) {
  const auto group = parallel::ProcessGroup::from_nccl(me.communicator);
  const core::StreamGuard guard(core::Stream::wrap(group.device(), me.stream));
  group.run([&] {
    if (dtype == "f32") return train<float>(flags, me, group);
    if (dtype == "bf16") return train<core::BFloat16>(flags, me, group);
    throw std::invalid_argument("expected --dtype f32 or bf16, got " + dtype);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    plain::Flags flags(argc, argv);
    const std::string dtype = flags.text("--dtype", "bf16");
    const plain::Rank me = plain::start_rank();
    train_in(dtype, flags, me);
    plain::end_rank(me);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plain_mlp_cairn: %s\n", error.what());
    return 1;
  }
}
