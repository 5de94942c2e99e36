// What the code in README, docs and headers takes for granted, by name: a model, an optimizer, a
// loader. Fragments are compiled, not linked, so a declaration is enough. A fragment may declare a
// name anew; it then means its own.
#pragma once

#include <cairn/amp/amp.h>
#include <cairn/amp/anomaly.h>
#include <cairn/amp/captured_step.h>
#include <cairn/amp/explain.h>
#include <cairn/amp/loss_scaler.h>
#include <cairn/amp/scaled_step.h>
#include <cairn/autograd/autograd.h>
#include <cairn/autograd/saved_bytes.h>
#include <cairn/checkpointing/batch_size.h>
#include <cairn/checkpointing/foreign_tensors.h>
#include <cairn/checkpointing/model_file.h>
#include <cairn/checkpointing/offload.h>
#include <cairn/checkpointing/parts.h>
#include <cairn/checkpointing/planner.h>
#include <cairn/checkpointing/recompute.h>
#include <cairn/checkpointing/safetensors.h>
#include <cairn/checkpointing/torch_file.h>
#include <cairn/checkpointing/training_plan.h>
#include <cairn/checkpointing/training_state.h>
#include <cairn/core/dlpack.h>
#include <cairn/core/generator.h>
#include <cairn/core/graph.h>
#include <cairn/core/log.h>
#include <cairn/core/status.h>
#include <cairn/data/csv.h>
#include <cairn/data/drawn_digits.h>
#include <cairn/data/idx.h>
#include <cairn/data/image_folder.h>
#include <cairn/data/loader.h>
#include <cairn/data/mean.h>
#include <cairn/data/text.h>
#include <cairn/data/transforms.h>
#include <cairn/kernels/elementwise.h>
#include <cairn/kernels/layer_norm.h>
#include <cairn/kernels/matmul.h>
#include <cairn/kernels/multi_tensor.h>
#include <cairn/kernels/optimizer_update.h>
#include <cairn/kernels/softmax.h>
#include <cairn/nn/nn.h>
#include <cairn/observe/run.h>
#include <cairn/optim/optim.h>
#include <cairn/parallel/compare.h>
#include <cairn/parallel/data_parallel.h>
#include <cairn/parallel/distributed.h>
#include <cairn/parallel/flatten.h>
#include <cairn/parallel/pipeline.h>
#include <cairn/parallel/process_group.h>
#include <cairn/parallel/sharded.h>
#include <cairn/parallel/sharded_states.h>
#include <cairn/parallel/sync_batch_norm.h>
#include <dlpack/dlpack.h>

#include <cmath>
#include <csignal>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// A fragment shows a call, not what becomes of its result.
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"

#ifdef CAIRN_PROSE_LIBTORCH
#include "setup_libtorch.h"
#else
namespace prose {

using namespace cairn;

// A training: what the README's step is made of.
nn::Sequential conv_net();
extern nn::Sequential model, encoder, decoder;
extern optim::FusedAdam optimizer;
extern optim::Schedule schedule;
extern amp::Amp precision;
extern amp::Options options;
extern parallel::ProcessGroup group;
extern parallel::DistributedDataParallel ddp;
extern parallel::Reducer reducer;
extern NamedTensors parameters;  // of a trainer with arrays of its own
extern int epochs, step;
void train_step();
void train_step(const data::Batch& batch);
void train_step(std::int64_t samples);
double train_epoch();  // its accuracy
extern amp::Explain explain;
extern amp::AnomalyMode anomaly;
void engine_get(int tensor, void* to, std::size_t at, std::size_t bytes);  // another library's
void engine_set(int tensor, const void* from, std::size_t at, std::size_t bytes);

// Data.
extern data::TensorDataset train;
extern data::DistributedSampler sampler, order;
extern data::DataLoader loader;
extern Device device;
extern std::vector<Device> devices;
extern std::vector<std::int64_t> tokens;
double hit_rate(const Tensor& logits, const Tensor& labels);

// Tensors, in the terms of docs/naming.md.
extern Tensor x, loss, weight, dweight, gradient, remainders, moment1, moment2, images, labels;
extern std::vector<TensorView> all_gradients;
extern kernels::PendingCheck other;

// A GAN: two models, three losses (docs/amp.md).
extern nn::Sequential d, g;
extern optim::FusedAdam d_optimizer, g_optimizer;
extern Tensor real, fake, fooled;

// What a trainer brings along: its own blocks, memory and lists.
Tensor block(const Tensor& x);
Tensor my_fused_block(const Tensor& x);
extern void *w_pointer, *g_pointer;
extern amp::LossScaler scaler;
extern observe::Run run;
extern DLManagedTensor* theirs;

}  // namespace prose
#endif
