#include "language_model.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <thread>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/offload.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/data_parallel.h"
#include "cairn/parallel/sharded.h"

namespace memory_pressure {

using namespace cairn;

namespace {

/// Sentences [B, T, width] -> [B, T, width].
class SentenceLstm : public nn::Module {
 public:
  explicit SentenceLstm(std::int64_t width)
      : width_(width), lstm_(add_module("lstm", nn::LSTM(width, width))) {}
  std::string kind() const override { return "SentenceLstm"; }
  Tensor forward(const Tensor& x) override {
    const Tensor steps = (*lstm_)(autograd::transpose(x, 0, 1));
    return autograd::contiguous(autograd::transpose(steps, 0, 1));
  }

 protected:
  std::shared_ptr<Module> make_like() const override {
    return std::make_shared<SentenceLstm>(width_);
  }

 private:
  std::int64_t width_;
  std::shared_ptr<nn::LSTM> lstm_;
};

/// Words [B, T] -> logits [B, T, words].
nn::Sequential language_model(const Job& job) {
  manual_seed(job.seed);
  const Sizes& s = job.sizes;
  return nn::Sequential(nn::Embedding(s.words, s.width), SentenceLstm(s.width),
                        nn::Linear(s.width, s.words));
}

Tensor hidden_of(nn::Sequential& model, const Tensor& x) {  // [B, T, width]
  return model.at(1)(model.at(0)(x));
}

struct Batch {
  Tensor x, next;  // [B, T]

  Batch part(std::int64_t begin, std::int64_t end) const {
    return {autograd::slice(x, 0, begin, end), autograd::slice(next, 0, begin, end)};
  }
};

/// Sentences whose words are as frequent as those of languages: the k-th about 1 / k.
Batch draw(const Job& job, int step) {
  const Sizes& s = job.sizes;
  const Shape shape{s.sentences, s.length + 1};
  const Tensor uniform = Tensor::empty(shape, DType::f32, Device{});
  Generator(job.seed + 1 + static_cast<std::uint64_t>(step)).fill_uniform(uniform, 0.0, 1.0);
  std::vector<std::int64_t> words;
  for (const double u : uniform.to_vector()) {
    const auto word = static_cast<std::int64_t>(std::pow(static_cast<double>(s.words), u)) - 1;
    words.push_back(std::min(word, s.words - 1));
  }
  const Tensor text = Tensor::from(words, shape, DType::i64, Device{});
  return {autograd::contiguous(autograd::slice(text, 1, 0, s.length)),
          autograd::contiguous(autograd::slice(text, 1, 1, s.length + 1))};
}

struct Training {
  explicit Training(const Job& job)
      : model(language_model(job)), optimizer(model.parameters(), {.lr = 4.0, .momentum = 0.9}) {}
  nn::Sequential model;
  optim::FusedSGD optimizer;
};

void tell(const optim::StepResult& result) {
  if (!result.applied) log::warn("{}", result.reason);
}

/// Trains by `step`, which makes one optimizer step and returns its loss.
template <class Step>
std::vector<double> steps_of(const Job& job, const std::function<void()>& stepped, Step step) {
  std::vector<double> losses;
  for (int i = 0; i < job.steps; ++i) {
    losses.push_back(step(draw(job, i)));
    stepped();
  }
  return losses;
}

/// A way whose loss alone is special: loss(model, batch).
template <class Loss>
Way by_loss(std::string name, std::string what, Loss loss) {
  const auto train = [loss](const Job& job, const std::function<void()>& stepped) {
    Training training(job);
    return steps_of(job, stepped, [&](const Batch& batch) {
      const Tensor value = loss(training.model, batch, job);
      autograd::backward(value);
      tell(training.optimizer.step());
      return value.item();
    });
  };
  return {std::move(name), std::move(what), train};
}

/// The mean loss as a sum over pieces of the hidden states: piece(hidden, next).
template <class Piece>
Tensor in_pieces(nn::Sequential& model, const Batch& batch, int pieces, const Piece& piece) {
  const Tensor hidden = hidden_of(model, batch.x);
  const std::int64_t n = hidden.size(0);
  Tensor total;
  for (int k = 0; k < pieces; ++k) {
    const std::int64_t begin = n * k / pieces, end = n * (k + 1) / pieces;
    if (begin == end) continue;
    const Tensor mean =
        piece(autograd::slice(hidden, 0, begin, end), autograd::slice(batch.next, 0, begin, end));
    const double share = static_cast<double>(end - begin) / static_cast<double>(n);
    const Tensor loss = autograd::affine(mean, share, 0.0);
    total = total.defined() ? total + loss : loss;
  }
  return total;
}

Tensor plain_loss(nn::Sequential& model, const Batch& batch, const Job&) {
  return nn::cross_entropy(model(batch.x), batch.next);
}

Tensor recomputed_loss(nn::Sequential& model, const Batch& batch, const Job& job) {
  return in_pieces(model, batch, job.pieces, [&](const Tensor& hidden, const Tensor& next) {
    return checkpointing::checkpoint(
        [&model, next](const Tensor& h) { return nn::cross_entropy(model.at(2)(h), next); },
        hidden);
  });
}

Tensor offloaded_loss(nn::Sequential& model, const Batch& batch, const Job& job) {
  checkpointing::Offload offload;
  const autograd::SavedTensorHooksGuard hooks(offload.hooks());
  return in_pieces(model, batch, job.pieces, [&](const Tensor& hidden, const Tensor& next) {
    return nn::cross_entropy(model.at(2)(hidden), next);
  });
}

Tensor fused_loss(nn::Sequential& model, const Batch& batch, bool recompute) {
  const auto& out = dynamic_cast<nn::Linear&>(model.at(2));
  return nn::linear_cross_entropy(hidden_of(model, batch.x), out.weight(), out.bias(), batch.next,
                                  {}, recompute);
}

std::vector<double> accumulate(const Job& job, const std::function<void()>& stepped) {
  Training training(job);
  optim::Accumulation accumulation({.steps = job.pieces});
  return steps_of(job, stepped, [&](const Batch& batch) {
    const std::int64_t n = batch.x.size(0);
    double loss = 0.0;
    for (int k = 0; k < job.pieces; ++k) {
      const Batch part = batch.part(n * k / job.pieces, n * (k + 1) / job.pieces);
      const auto count = part.x.size(0);
      const auto micro = accumulation.begin(count);
      const Tensor mean = nn::cross_entropy(training.model(part.x), part.next);
      autograd::backward(autograd::affine(mean, micro.weight(), 0.0));
      loss += mean.item() * static_cast<double>(count) / static_cast<double>(n);
    }
    tell(training.optimizer.step({.gradient_scale = accumulation.finish()}));
    return loss;
  });
}

std::vector<double> half(const Job& job, const std::function<void()>& stepped) {
  Training training(job);
  amp::Amp precision = amp::initialize(training.model, training.optimizer,
                                       {.opt_level = amp::OptLevel::O2,
                                        .half_dtype = DType::bf16,
                                        .cast_model_outputs = DType::bf16});
  return steps_of(job, stepped, [&](const Batch& batch) {
    const Tensor loss = plain_loss(training.model, batch, job);
    precision.backward(loss);
    tell(precision.step());
    return loss.item();
  });
}

std::vector<double> balanced(const Job& job, const std::function<void()>& stepped) {
  Training training(job);
  std::vector<Device> devices;
  devices.reserve(static_cast<std::size_t>(job.devices));
  for (int i = 0; i < job.devices; ++i) devices.push_back({core::DeviceType::cpu, i});
  parallel::DataParallelModel net(training.model, devices);
  parallel::DataParallelCriterion criterion(
      [](const Tensor& logits, const Tensor& next) { return nn::cross_entropy(logits, next); });
  return steps_of(job, stepped, [&](const Batch& batch) {
    const Tensor loss = criterion(net(batch.x), batch.next);
    autograd::backward(loss);
    tell(training.optimizer.step());
    return loss.item();
  });
}

using DataParallel = std::unique_ptr<parallel::DistributedDataParallel>;
using MakeDataParallel = DataParallel (*)(nn::Module&, const parallel::ProcessGroup&);

/// One rank of several, with a device of its own and its part of the batch.
std::vector<double> rank_of_many(const Job& job, const parallel::ProcessGroup& group,
                                 MakeDataParallel make, const std::function<void()>& stepped) {
  const Device device{core::DeviceType::cpu, group.rank()};
  const core::DefaultDeviceGuard here(device);
  Training training(job);
  const DataParallel ddp = make(training.model, group);
  const World world = ddp->world();
  amp::Amp precision = amp::initialize(training.model, training.optimizer,
                                       {.opt_level = amp::OptLevel::O0, .world = world});
  return steps_of(job, stepped, [&](const Batch& batch) {
    const std::int64_t n = batch.x.size(0), ranks = world.size;
    const Batch part = batch.part(n * world.rank / ranks, n * (world.rank + 1) / ranks);
    const Tensor loss =
        nn::cross_entropy((*ddp)(autograd::to(part.x, device)), autograd::to(part.next, device));
    precision.backward(loss);
    tell(precision.step());
    return world.sum(loss.item(), "loss") / static_cast<double>(ranks);
  });
}

/// Ranks that hear of another's error throw as well.
void throw_unless_it_followed(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const core::CommunicationError&) {
  }
}

/// A way whose ranks are threads.
Way of_ranks(std::string name, std::string what, MakeDataParallel make) {
  const auto train = [make](const Job& job, const std::function<void()>& stepped) {
    const auto groups = parallel::ProcessGroup::in_process(job.devices);
    std::vector<std::vector<double>> losses(groups.size());
    std::vector<std::exception_ptr> errors(groups.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < groups.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          groups[r].run([&] {
            losses[r] = rank_of_many(
                job, groups[r], make, r == 0 ? stepped : [] {});
          });
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) throw_unless_it_followed(error);
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
    return losses.front();
  };
  return {std::move(name), std::move(what), train};
}

template <parallel::ZeroStage stage>
DataParallel sharded(nn::Module& model, const parallel::ProcessGroup& group) {
  return std::make_unique<parallel::ShardedDataParallel>(model, group,
                                                         parallel::ShardedOptions{.stage = stage});
}

DataParallel replicated(nn::Module& model, const parallel::ProcessGroup& group) {
  return std::make_unique<parallel::DistributedDataParallel>(model, group);
}

amp::Options amp_options(const checkpointing::Precision& precision) {
  amp::Options options;
  options.opt_level = precision.half_weights ? amp::OptLevel::O2
                      : precision.autocast   ? amp::OptLevel::O1
                                             : amp::OptLevel::O0;
  if (core::is_half(precision.half)) options.half_dtype = precision.half;
  return options;
}

/// It tried every size and precision; what is told is of the training.
void forget_planning() {
  core::release_cached_memory(Device{});
  core::reset_peak_memory(Device{});
  core::reset_most_process_memory();
}

/// What plan_training takes for the fastest within the budget.
std::vector<double> trained_by_plan(const Job& job, const std::function<void()>& stepped) {
  Training training(job);
  checkpointing::TrainingPlanOptions options;
  options.moments = 1;
  options.tensors_only = true;  // as the device is capped
  std::erase_if(options.precisions, [](const auto& p) { return p.half == DType::f16; });
  const Batch first = draw(job, 0);
  const std::size_t budget = job.budget > 0 ? job.budget : SIZE_MAX / 4;
  const auto choice =
      checkpointing::plan_training(training.model, {first.x, first.next}, budget, {}, options)
          .best();
  std::fprintf(stderr, "planned: %s\n", choice.describe().c_str());
  forget_planning();
  amp::Amp precision =
      amp::initialize(training.model, training.optimizer, amp_options(choice.precision));
  if (choice.micro_batches > 1) optim::GradientArena::attach(training.model.parameters(), true);
  return steps_of(job, stepped, [&](const Batch& batch) {
    const double share = 1.0 / static_cast<double>(choice.micro_batches);
    double loss = 0.0;
    for (std::int64_t k = 0; k < choice.micro_batches; ++k) {
      const Batch part = batch.part(k * choice.micro_batch, (k + 1) * choice.micro_batch);
      const auto region = precision.region();
      const Tensor mean = choice.loss(training.model, part.x, part.next);
      precision.backward(mean);
      loss += mean.item() * share;
    }
    tell(precision.step({.gradient_scale = share}));
    return loss;
  });
}

}  // namespace

std::vector<Way> language_model_ways() {
  return {
      by_loss("plain", "everything at once", plain_loss),
      {"accumulation", "micro-batches, gradients added up", accumulate},
      {"o2", "bf16: half of the logits' bytes", half},
      by_loss("recomputation", "the loss in pieces, each recomputed in the backward",
              recomputed_loss),
      by_loss("offload", "the loss in pieces, their logits in a file until the backward",
              offloaded_loss),
      by_loss("fused", "linear + cross-entropy as one operation: no logits",
              [](nn::Sequential& model, const Batch& batch, const Job&) {
                return fused_loss(model, batch, false);
              }),
      by_loss("fused-recompute", "the same, its gradients made in the backward",
              [](nn::Sequential& model, const Batch& batch, const Job&) {
                return fused_loss(model, batch, true);
              }),
      {"balanced", "a part of the batch and its loss on each device", balanced},
      of_ranks("ddp", "a part of the batch on each device, models kept equal", replicated),
      of_ranks("zero", "the same, gradients and optimizer's states divided (stage 2)",
               sharded<parallel::ZeroStage::gradients>),
      of_ranks("fsdp", "the same, weights too (stage 3)", sharded<parallel::ZeroStage::parameters>),
      {"planned", "the fastest that plan_training finds within the budget", trained_by_plan},
  };
}

}  // namespace memory_pressure
