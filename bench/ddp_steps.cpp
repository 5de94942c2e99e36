// ddp_steps turns MODEL RANKS STEPS PORT          a step of DDP, with overlap and without, the same
//                                                 without DDP on as many ranks at once, its
//                                                 buckets' all_reduces alone, and a step of
//                                                 ShardedDataParallel, by turns
// ddp_steps train MODEL RANKS THREADS STEPS PORT [STAGE]
//                                                 a step of ranks of so many threads, of DDP or of
//                                                 ShardedDataParallel at a stage of 1 to 3; one
//                                                 rank has no DDP
// ddp_steps control PORT                          the CPU time of the control plane
// ddp_steps pipeline RANKS MICRO_BATCHES SCHEDULE PORT
//                                                 a step of stages that sleep in both directions;
//                                                 SCHEDULE is gpipe or 1f1b
//
// MODEL is convnet (100 images a thread) or gpt (6 layers of 384, two rows of 256 tokens a thread);
// f32. One JSON line: medians in milliseconds.
#include <sys/resource.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

#include "cairn/amp/amp.h"
#include "cairn/autograd/function.h"
#include "cairn/core/generator.h"
#include "cairn/core/parallel_for.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/pipeline.h"
#include "cairn/parallel/sharded.h"
#include "ranks.h"
#include "support/conv_net.h"
#include "support/gpt.h"

namespace {

using namespace cairn;

struct Batch {
  Tensor x, target;
};

Tensor integers(const Shape& shape, std::int64_t below) {
  Tensor x = Tensor::empty(shape, DType::i64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<std::int64_t>()[i] = i * 7919 % below;
  return x;
}

Batch images(std::int64_t count) {
  Tensor x = Tensor::empty({count, 1, 28, 28});
  Generator(5).fill_normal(x, 0.0, 1.0);
  return {x, integers({count}, 10)};
}
Batch texts(std::int64_t rows) {
  return {integers({rows, 256}, 256), integers({rows, 256}, 256)};
}

constexpr parallel::ZeroStage kStages[] = {parallel::ZeroStage::optimizer_states,
                                           parallel::ZeroStage::gradients,
                                           parallel::ZeroStage::parameters};
using Stage = std::optional<parallel::ZeroStage>;  // nothing: DistributedDataParallel

/// A model with all that a step needs; with DDP where there are several ranks.
class Training {
 public:
  Training(std::shared_ptr<nn::Module> model, Batch batch, const parallel::ProcessGroup& group,
           const parallel::DistributedOptions& options, Stage stage)
      : model_(std::move(model)),
        batch_(std::move(batch)),
        optimizer_(model_->parameters(), {.lr = 1e-3, .weight_decay = 0.01}) {
    if (stage) {
      ddp_ = std::make_unique<parallel::ShardedDataParallel>(
          *model_, group, parallel::ShardedOptions{.stage = *stage, .distributed = options});
    } else if (group.world_size() > 1) {
      ddp_ = std::make_unique<parallel::DistributedDataParallel>(*model_, group, options);
    }
    amp::Options o0{.opt_level = amp::OptLevel::O0};
    if (ddp_) o0.world = ddp_->world();
    precision_.emplace(amp::initialize(*model_, optimizer_, o0));
  }
  void step() {
    const Tensor y = ddp_ ? (*ddp_)(batch_.x) : (*model_)(batch_.x);
    precision_->backward(nn::cross_entropy(y, batch_.target));
    (void)precision_->step();
  }
  std::vector<parallel::Reducer::Bucket> buckets() const { return ddp_->buckets(); }

 private:
  std::shared_ptr<nn::Module> model_;
  Batch batch_;
  optim::FusedAdam optimizer_;
  std::unique_ptr<parallel::DistributedDataParallel> ddp_;
  std::optional<amp::Amp> precision_;
};

std::unique_ptr<Training> training(const std::string& model, std::int64_t threads,
                                   const parallel::ProcessGroup& group,
                                   const parallel::DistributedOptions& options = {},
                                   Stage stage = {}) {
  manual_seed(1);
  if (model == "convnet")
    return std::make_unique<Training>(std::make_shared<nn::Sequential>(support::conv_net()),
                                      images(100 * threads), group, options, stage);
  const support::GptSizes sizes{
      .vocabulary = 256, .tokens = 256, .width = 384, .layers = 6, .heads = 6};
  return std::make_unique<Training>(std::make_shared<support::Gpt>(sizes), texts(2 * threads),
                                    group, options, stage);
}

parallel::ProcessGroup join(int rank, int ranks, const char* port) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", port, 1);
  return parallel::ProcessGroup::from_environment();
}

double median(const std::vector<double>& times) {
  std::vector<double> values = times;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

/// "[1.2, 3.4]"
std::string list_of(const std::vector<std::vector<double>>& all,
                    double (*of)(const std::vector<double>&)) {
  std::string text;
  for (const auto& one : all) text += (text.empty() ? "[" : ", ") + std::to_string(of(one));
  return text + "]";
}

int turns(const std::string& model, int ranks, int steps, const char* port) {
  return bench::run_ranks(ranks, [&](int rank) {
    core::set_num_threads(1);
    const auto group = join(rank, ranks, port);
    const auto overlapped = training(model, 1, group);
    const auto delayed = training(model, 1, group, {.delay_allreduce = true});
    const auto alone = training(model, 1, parallel::ProcessGroup::single());
    std::vector<std::unique_ptr<Training>> sharded;
    for (const auto stage : kStages) sharded.push_back(training(model, 1, group, {}, stage));
    overlapped->step();  // buckets follow the first backward
    std::vector<Tensor> buckets;
    for (const auto& bucket : overlapped->buckets())
      buckets.push_back(Tensor::zeros({bucket.bytes / 4}));
    std::vector<std::function<void()>> kinds = {
        [&] { overlapped->step(); }, [&] { delayed->step(); }, [&] { alone->step(); },
        [&] {
          for (const Tensor& bucket : buckets) group.all_reduce(bucket, parallel::ReduceOp::mean);
        }};
    for (const auto& one : sharded) kinds.emplace_back([&one] { one->step(); });
    std::vector<std::vector<double>> times(kinds.size());
    for (int turn = -2; turn < steps; ++turn) {
      for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
        group.barrier();
        const auto begin = std::chrono::steady_clock::now();
        kinds[kind]();
        group.barrier();  // the slower rank counts
        const std::chrono::duration<double, std::milli> taken =
            std::chrono::steady_clock::now() - begin;
        if (turn >= 0) times[kind].push_back(taken.count());
      }
    }
    if (rank != 0) return;
    std::vector<double> shares, gains;
    std::vector<std::vector<double>> sharded_shares(sharded.size());
    for (std::size_t i = 0; i < times[0].size(); ++i) {
      shares.push_back(times[0][i] / std::max(times[2][i], times[3][i]));
      gains.push_back(times[1][i] / times[0][i]);
      for (std::size_t s = 0; s < sharded.size(); ++s)
        sharded_shares[s].push_back(times[4 + s][i] / times[0][i]);
    }
    std::printf(
        "{\"overlapped_ms\": %.4f, \"delayed_ms\": %.4f, \"compute_ms\": %.4f, "
        "\"communication_ms\": %.4f, \"share\": %.4f, \"gain\": %.4f, \"sharded_shares\": %s, "
        "\"fastest_ms\": %s}\n",
        median(times[0]), median(times[1]), median(times[2]), median(times[3]), median(shares),
        median(gains), list_of(sharded_shares, median).c_str(), list_of(times, least).c_str());
  });
}

int train(const std::string& model, int ranks, int threads, int steps, const char* port,
          Stage stage) {
  return bench::run_ranks(ranks, [&](int rank) {
    core::set_num_threads(threads);
    const auto group = ranks > 1 ? join(rank, ranks, port) : parallel::ProcessGroup::single();
    const auto work = training(model, threads, group, {}, stage);
    const bench::Times times = bench::time_runs(steps, [&] { work->step(); });
    group.barrier();
    if (rank == 0) bench::print(times);
  });
}

double cpu_seconds(int who) {
  rusage usage{};
  getrusage(who, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Two ranks that do nothing but two collectives every 10 ms: the CPU time of all threads but the
/// one that calls them, and what a collective of 4 bytes takes that one, of the time that passes.
int control(const char* port) {
  return bench::run_ranks(2, [&](int rank) {
    constexpr int kSteps = 300;
    const auto group = join(rank, 2, port);
    const Tensor flag = Tensor::zeros({1});
    group.all_reduce(flag);
    const auto begin = std::chrono::steady_clock::now();
    const double process = cpu_seconds(RUSAGE_SELF), caller = cpu_seconds(RUSAGE_THREAD);
    for (int i = 0; i < kSteps; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      group.all_reduce(flag);
    }
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    const double called = cpu_seconds(RUSAGE_THREAD) - caller;
    const double control = cpu_seconds(RUSAGE_SELF) - process - called;
    group.barrier();
    if (rank == 0)
      std::printf("{\"share\": %.6f, \"ms\": %.6f}\n", control / passed.count(),
                  1000 * control / kSteps);
  });
}

constexpr std::chrono::milliseconds kSlot{10};  // of a pipeline's forwards and backwards

struct Sleeps {
  static constexpr autograd::OpInfo kInfo{"sleeps"};
  static Tensor forward(autograd::Context& /*ctx*/, const Tensor& x, const Tensor& /*weight*/) {
    std::this_thread::sleep_for(kSlot);
    Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  static autograd::Tensors backward(autograd::Context& /*ctx*/, const Tensor& dy) {
    std::this_thread::sleep_for(kSlot);
    return {dy, Tensor()};
  }
};

class Sleeper : public nn::Module {
 public:
  std::string kind() const override { return "Sleeper"; }
  Sleeper() : weight_(add_parameter("weight", Tensor::zeros({}))) {}
  Tensor forward(const Tensor& x) override { return autograd::apply(Sleeps{}, x, weight_); }

 private:
  Tensor weight_;
};

int pipeline(int ranks, int micro_batches, const std::string& schedule, const char* port) {
  return bench::run_ranks(ranks, [&](int rank) {
    core::set_num_threads(1);
    const auto group = join(rank, ranks, port);
    Sleeper stage;
    const auto loss = [](const Tensor& y, const Tensor&) { return autograd::mean(y); };
    parallel::RankPipeline part(
        {stage, Device{}}, group, loss,
        {.micro_batches = micro_batches,
         .schedule = schedule == "gpipe" ? parallel::PipelineSchedule::gpipe
                                         : parallel::PipelineSchedule::one_forward_one_backward});
    const Tensor batch = Tensor::zeros({micro_batches, 256});
    const bench::Times times = bench::time_runs(10, [&] {
      part.train_step(rank == 0 ? batch : Tensor(), rank + 1 == ranks ? batch : Tensor());
    });
    if (rank == 0) bench::print(times);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "turns" && argc == 6)
    return turns(argv[2], std::atoi(argv[3]), std::atoi(argv[4]), argv[5]);
  if (mode == "train" && (argc == 7 || argc == 8))
    return train(argv[2], std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]), argv[6],
                 argc == 8 ? Stage(kStages[std::clamp(std::atoi(argv[7]), 1, 3) - 1]) : Stage());
  if (mode == "control" && argc == 3) return control(argv[2]);
  if (mode == "pipeline" && argc == 6)
    return pipeline(std::atoi(argv[2]), std::atoi(argv[3]), argv[4], argv[5]);
  std::fprintf(
      stderr, "expected turns, train, control or pipeline; the source's first lines say what of\n");
  return 2;
}
