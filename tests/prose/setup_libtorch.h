// setup.h for what speaks of libtorch.
#pragma once

#include <cairn/libtorch/amp.h>
#include <cairn/libtorch/autocast.h>
#include <cairn/libtorch/checkpoint.h>
#include <cairn/libtorch/generator.h>
#include <cairn/libtorch/model.h>
#include <cairn/libtorch/optimizer.h>
#include <cairn/libtorch/sync_batch_norm.h>
#include <cairn/libtorch/tensors.h>
#include <torch/torch.h>

namespace prose {

using namespace cairn;

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Net);
extern Net net, block;
extern torch::data::Example<> batch;
extern std::vector<torch::data::Example<>> loader;
extern parallel::ProcessGroup group;
extern libtorch::Model model;
extern optim::FusedAdam optimizer;
extern libtorch::Amp precision;
extern torch::Tensor x, y, loss, theirs;
extern Tensor ours;

}  // namespace prose
