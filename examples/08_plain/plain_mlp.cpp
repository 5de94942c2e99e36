// Trains an MLP on GPUs with nothing but CUDA and NCCL: flat arrays, kernels and AdamW of its own,
// f32, every rank with all of the optimizer's state.
#include <cstdio>
#include <exception>

#include "flags.h"
#include "mlp.h"

namespace {

void train(plain::Flags& flags, const plain::Rank& me) {
  const auto steps = static_cast<std::int64_t>(flags.number("--steps", 100));
  flags.end();

  const plain::MlpSizes sizes;
  const plain::Text text(sizes.tokens);
  plain::Mlp<float> model(sizes, 1, me.stream);
  const std::size_t size = model.layout.size;
  plain::GpuArray<float> m(size, me.stream), v(size, me.stream);

  for (std::int64_t step = 0; step < steps; ++step) {
    const plain::Batch batch =
        text.batch(step, static_cast<std::size_t>(me.rank) * sizes.rows, sizes.rows);
    const float loss = model.forward_backward(batch, 1.0f);
    plain::must(ncclAllReduce(model.gradients.data, model.gradients.data, size, ncclFloat32,
                              ncclSum, me.communicator, me.stream));
    plain::adamw(model.weights.data, model.gradients.data, m.data, v.data, size,
                 static_cast<int>(step + 1), 1e-2f, 0.01f, me.ranks, me.stream);
    std::printf("rank %d step %d loss %.6f\n", me.rank, static_cast<int>(step + 1), loss);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    plain::Flags flags(argc, argv);
    const plain::Rank me = plain::start_rank();
    train(flags, me);
    plain::end_rank(me);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plain_mlp: %s\n", error.what());
    return 1;
  }
}
