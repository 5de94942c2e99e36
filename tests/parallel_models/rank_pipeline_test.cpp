// Pipelines with a stage on each rank, as threads and as processes, against the pipeline of one
// process and the model in one piece: the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdlib.h>

#include <mutex>

#include "cairn/autograd/autograd.h"
#include "cairn/autograd/function.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/pipeline.h"
#include "parallel/ranks.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using test::random_tensor;
using test::run_ranks;
using test::run_threads;
using testing::AllOf;
using testing::HasSubstr;
using Values = std::vector<double>;

constexpr std::int64_t kRankPipelineWidth = 8;
constexpr int kLayers = 4;
constexpr PipelineSchedule kRankPipelineSchedules[] = {PipelineSchedule::gpipe,
                                                       PipelineSchedule::one_forward_one_backward};

/// Layers first ... last of the model, with the whole model's weights.
std::shared_ptr<nn::Sequential> layers(int first, int last,
                                       std::int64_t width = kRankPipelineWidth) {
  manual_seed(4);
  auto part = std::make_shared<nn::Sequential>();
  for (int i = 0; i < kLayers; ++i) {
    auto layer = std::make_shared<nn::Sequential>(nn::Linear(width, width), nn::Tanh());
    if (i >= first && i < last) part->add(layer);
  }
  return part;
}
std::shared_ptr<nn::Sequential> stage_of(int rank, int ranks) {
  return layers(rank * kLayers / ranks, (rank + 1) * kLayers / ranks);
}

Tensor rank_pipeline_batch(std::int64_t n, std::uint64_t seed) {
  return random_tensor({n, kRankPipelineWidth}, DType::f32, Device{}, seed);
}
Tensor rank_pipeline_loss_of(const Tensor& y, const Tensor& t) {
  return nn::mse_loss(y, t);
}

Values gradients_of(const nn::Module& module) {
  Values all;
  for (const auto& [name, tensor] : module.parameters()) {
    if (!tensor.grad().defined()) continue;
    const Values values = tensor.grad().to_vector();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

struct Result {
  Values loss;
  std::vector<Values> gradients;  // by stage
};

Result in_one_process(int stages, std::int64_t n, const PipelineOptions& options) {
  std::vector<std::shared_ptr<nn::Sequential>> modules;
  std::vector<PipelineStage> list;
  for (int s = 0; s < stages; ++s) {
    modules.push_back(stage_of(s, stages));
    list.push_back({*modules.back(), Device{}});
  }
  Pipeline pipeline(list, rank_pipeline_loss_of, options);
  Result result{
      pipeline.train_step(rank_pipeline_batch(n, 1), rank_pipeline_batch(n, 2)).to_vector(), {}};
  for (const auto& module : modules) result.gradients.push_back(gradients_of(*module));
  return result;
}

/// The unsplit model, micro-batch by micro-batch: all gradients in the order of the layers.
Values in_one_piece(std::int64_t n, int micro_batches) {
  const auto model = layers(0, kLayers);
  const Tensor x = rank_pipeline_batch(n, 1), t = rank_pipeline_batch(n, 2);
  const std::int64_t each = (n + micro_batches - 1) / micro_batches;
  for (std::int64_t begin = 0; begin < n; begin += each) {
    const std::int64_t end = std::min(begin + each, n);
    const Tensor loss = rank_pipeline_loss_of((*model)(autograd::slice(x, 0, begin, end)),
                                              autograd::slice(t, 0, begin, end));
    const double share = static_cast<double>(end - begin) / static_cast<double>(n);
    autograd::backward(autograd::affine(loss, share, 0.0));
  }
  return gradients_of(*model);
}

/// x on the first rank, the target on the last, and nothing elsewhere.
Tensor step(RankPipeline& pipeline, const ProcessGroup& group, std::int64_t n,
            std::uint64_t seed = 1) {
  const bool last = group.rank() + 1 == group.world_size();
  return pipeline.train_step(group.rank() == 0 ? rank_pipeline_batch(n, seed) : Tensor(),
                             last ? rank_pipeline_batch(n, seed + 1) : Tensor());
}

void expect_the_same_bits(const ProcessGroup& group) {
  const int rank = group.rank(), ranks = group.world_size();
  for (const PipelineSchedule schedule : kRankPipelineSchedules) {
    for (const int micro_batches : {1, 3, 4, 9}) {  // 7 samples: 7; 3, 3, 1; 2, 2, 2, 1; 7 of 1
      const PipelineOptions options{micro_batches, schedule};
      const std::string what = core::str(ranks, " ranks, ", micro_batches, " micro-batches");
      const auto own = stage_of(rank, ranks);
      const bool last = rank + 1 == ranks;
      RankPipeline pipeline({*own, Device{}}, group,
                            last ? rank_pipeline_loss_of : Pipeline::Loss(), options);
      const Tensor mean = step(pipeline, group, 7);
      const Result expected = in_one_process(ranks, 7, options);
      EXPECT_EQ(mean.to_vector(), expected.loss) << what;
      EXPECT_FALSE(mean.requires_grad());
      EXPECT_EQ(gradients_of(*own), expected.gradients[static_cast<std::size_t>(rank)]) << what;
      const Values whole = in_one_piece(7, micro_batches);
      Values before;
      for (int s = 0; s < rank; ++s) {
        const Values& part = expected.gradients[static_cast<std::size_t>(s)];
        before.insert(before.end(), part.begin(), part.end());
      }
      const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(before.size());
      const Values mine = gradients_of(*own);
      EXPECT_TRUE(std::equal(mine.begin(), mine.end(), begin)) << what;
      EXPECT_EQ(pipeline.report().slots, 2 * (pipeline.report().micro_batches + ranks - 1)) << what;
      const Tensor y = pipeline(rank == 0 ? rank_pipeline_batch(7, 1) : Tensor());
      EXPECT_EQ(y.defined(), last);
      if (last) {
        EXPECT_EQ(y.to_vector(), (*layers(0, kLayers))(rank_pipeline_batch(7, 1)).to_vector())
            << what;
      }
    }
  }
}

TEST(RankPipeline, HasTheBitsOfOneProcessOnThreads) {
  for (const int ranks : {1, 2, 3, 4}) run_threads(ranks, expect_the_same_bits);
}
TEST(RankPipeline, HasTheBitsOfOneProcessOnProcesses) {
  run_ranks(3, expect_the_same_bits);
}

// Activations that no buffer between ranks holds, in both directions at once.
void train_on_large_activations(const ProcessGroup& group) {
  constexpr std::int64_t kWide = 64, kRows = 6 * 16384;  // 4 MiB a micro-batch
  const int rank = group.rank(), ranks = group.world_size();
  const auto own = layers(rank * kLayers / ranks, (rank + 1) * kLayers / ranks, kWide);
  optim::FusedSGD sgd(own->parameters(), {.lr = 0.1});
  for (const PipelineSchedule schedule : kRankPipelineSchedules) {
    RankPipeline pipeline({*own, Device{}}, group, rank_pipeline_loss_of, {6, schedule});
    const Tensor x = random_tensor({kRows, kWide}, DType::f32, Device{}, 1);
    const double first = pipeline.train_step(x, x).item();
    test::expect_applied(sgd.step());
    EXPECT_LT(pipeline.train_step(x, x).item(), first);
    sgd.clear_grad();
  }
}

TEST(RankPipeline, LargeActivationsPassEachOtherOnThreads) {
  run_threads(3, train_on_large_activations);
}
TEST(RankPipeline, LargeActivationsPassEachOtherOnProcesses) {
  run_ranks(2, train_on_large_activations);
}

TEST(RankPipeline, TrainsAccumulatesAndFollowsOtherBatchSizes) {
  const auto whole = layers(0, kLayers);
  optim::FusedSGD sgd(whole->parameters(), {.lr = 0.5});
  Values expected;
  const std::int64_t sizes[] = {6, 1, 7, 12};
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Tensor loss = rank_pipeline_loss_of((*whole)(rank_pipeline_batch(sizes[i], i)),
                                              rank_pipeline_batch(sizes[i], i + 1));
    autograd::backward(loss);
    expected.push_back(loss.item());
    if (i % 2 == 1) test::expect_applied(sgd.step());
  }
  run_threads(4, [&](const ProcessGroup& group) {
    const auto own = stage_of(group.rank(), 4);
    optim::FusedSGD its(own->parameters(), {.lr = 0.5});
    RankPipeline pipeline({*own, Device{}}, group, rank_pipeline_loss_of, {.micro_batches = 3});
    Values got;
    for (std::uint64_t i = 0; i < 4; ++i) {
      got.push_back(step(pipeline, group, sizes[i], i).item());
      if (i % 2 == 1) test::expect_applied(its.step());
    }
    test::expect_close(got, expected, 1e-5, 1e-6);
  });
}

// Frozen: stages before the first that trains get no gradient and send none.
TEST(RankPipeline, FrozenStagesSendNothingBack) {
  for (const unsigned frozen : {0b0001u, 0b0011u, 0b0110u, 0b1000u, 0b1111u}) {
    const auto is_frozen = [&](int layer) { return (frozen >> layer & 1u) != 0; };
    const auto freeze = [](nn::Module& module) {
      for (const auto& [name, tensor] : module.parameters())
        Tensor(tensor).set_requires_grad(false);
    };
    std::vector<std::shared_ptr<nn::Sequential>> alone;
    Tensor y = rank_pipeline_batch(8, 1);
    for (int i = 0; i < kLayers; ++i) {
      alone.push_back(stage_of(i, kLayers));
      if (is_frozen(i)) freeze(*alone.back());
      y = (*alone.back())(y);
    }
    if (frozen != 0b1111u) autograd::backward(rank_pipeline_loss_of(y, rank_pipeline_batch(8, 2)));
    run_threads(kLayers, [&](const ProcessGroup& group) {
      const auto own = stage_of(group.rank(), kLayers);
      if (is_frozen(group.rank())) freeze(*own);
      RankPipeline pipeline({*own, Device{}}, group, rank_pipeline_loss_of, {.micro_batches = 1});
      step(pipeline, group, 8);
      EXPECT_EQ(gradients_of(*own), gradients_of(*alone[static_cast<std::size_t>(group.rank())]))
          << frozen;
    });
  }
}

/// Images, channels last and in bf16, whose plane changes from stage to stage.
std::shared_ptr<nn::Sequential> image_stage(int stage) {
  manual_seed(9);
  auto first = std::make_shared<nn::Sequential>(nn::Conv2d(3, 8, 3, {.padding = 1}), nn::ReLU(),
                                                nn::MaxPool2d(2));
  auto second = std::make_shared<nn::Sequential>(nn::Conv2d(8, 4, 3, {.padding = 1}), nn::Flatten(),
                                                 nn::Linear(64, 3));
  first->to(DType::bf16);
  second->to(DType::bf16);
  return stage == 0 ? first : second;
}

TEST(RankPipeline, KeepsDtypesAndLayouts) {
  const Tensor x =
      autograd::channels_last(random_tensor({5, 3, 8, 8}, DType::bf16, Device{}, 1)).detach();
  const Tensor t = random_tensor({5, 3}, DType::bf16, Device{}, 2);
  const auto a = image_stage(0), b = image_stage(1);
  Pipeline alone({{*a, Device{}}, {*b, Device{}}}, rank_pipeline_loss_of, {.micro_batches = 2});
  const Values loss = alone.train_step(x, t).to_vector();
  run_threads(2, [&](const ProcessGroup& group) {
    const auto own = image_stage(group.rank());
    RankPipeline pipeline({*own, Device{}}, group, rank_pipeline_loss_of, {.micro_batches = 2});
    const Tensor mean = pipeline.train_step(x, t);
    EXPECT_EQ(mean.dtype(), DType::f32);
    EXPECT_EQ(mean.to_vector(), loss);
    EXPECT_EQ(gradients_of(*own), gradients_of(group.rank() == 0 ? *a : *b));
  });
}

// What the schedules differ in: the first rank's activations.
TEST(RankPipeline, OneForwardOneBackwardKeepsFewerActivations) {
  const auto peak = [](PipelineSchedule schedule) {
    double most = 0;
    run_threads(2, [&](const ProcessGroup& group) {
      const Device own{core::DeviceType::cpu, group.rank()};
      const auto part = stage_of(group.rank(), 2);
      part->to(own);
      RankPipeline pipeline({*part, own}, group, rank_pipeline_loss_of, {16, schedule});
      step(pipeline, group, 16 * 256);
      group.barrier();
      core::reset_peak_memory(own);
      step(pipeline, group, 16 * 256);
      if (group.rank() != 0) return;
      const auto stats = core::memory_stats(own);
      most = static_cast<double>(stats.peak_of(core::MemoryCategory::activations));
    });
    return most;
  };
  const double few = peak(kRankPipelineSchedules[1]), all = peak(kRankPipelineSchedules[0]);
  EXPECT_GT(few, 0);
  EXPECT_LT(2.5 * few, all);
}

// ---- Errors

template <class E, class F>
std::string rank_pipeline_error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "nothing thrown";
}

/// Fails in the third forward of one rank, or in its third backward.
struct Fails {
  static constexpr autograd::OpInfo kInfo{"fails"};
  int* forwards;
  int* backwards;
  Tensor forward(autograd::Context& /*ctx*/, const Tensor& x) const {
    if (forwards != nullptr && ++*forwards == 3) core::fail("stage", "expected luck, got none");
    Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  autograd::Tensors backward(autograd::Context& /*ctx*/, const Tensor& dy) const {
    if (backwards != nullptr && ++*backwards == 3) core::fail("stage", "expected luck, got none");
    return {dy};
  }
};

class Unlucky : public nn::Module {
 public:
  explicit Unlucky(bool in_forward)
      : linear_(add_module("linear", nn::Linear(kRankPipelineWidth, kRankPipelineWidth))),
        in_forward_(in_forward) {}
  std::string kind() const override { return "Unlucky"; }
  Tensor forward(const Tensor& x) override {
    const Fails fails{in_forward_ ? &calls_ : nullptr, in_forward_ ? nullptr : &calls_};
    return autograd::apply(fails, (*linear_)(x));
  }

 private:
  std::shared_ptr<nn::Linear> linear_;
  bool in_forward_;
  int calls_ = 0;
};

void expect_an_error_everywhere(const ProcessGroup& group, int unlucky, bool in_forward,
                                Device device = {}) {
  const auto own = stage_of(group.rank(), group.world_size());
  Unlucky other(in_forward);
  nn::Module& module = group.rank() == unlucky ? static_cast<nn::Module&>(other) : *own;
  module.to(device);
  optim::FusedSGD sgd(module.parameters(), {.lr = 0.5});
  RankPipeline pipeline({module, device}, group, rank_pipeline_loss_of, {.micro_batches = 4});
  const auto run = [&] { step(pipeline, group, 8); };
  if (group.rank() == unlucky) {
    EXPECT_THAT(rank_pipeline_error_of<core::InvalidArgument>(run),
                HasSubstr("expected luck, got none"));
  } else {
    const std::string error = rank_pipeline_error_of<core::CommunicationError>(run);
    EXPECT_THAT(error,
                HasSubstr(core::str("rank ", unlucky, " gave up: pipeline stage ", unlucky)));
    EXPECT_THAT(error, HasSubstr("expected luck, got none"));
  }
  // Gradients of some micro-batches; none where the failure came before the first backward.
  const std::string outcome = rank_pipeline_error_of<core::Error>([&] {
    if (!sgd.step().applied) core::fail("step", "nothing to step with");
  });
  EXPECT_THAT(outcome, testing::AnyOf(HasSubstr("expected luck"), HasSubstr("nothing to step")));
}

TEST(RankPipeline, AFailureOfOneRankReachesAllOnThreads) {
  for (int unlucky = 0; unlucky < 3; ++unlucky) {
    for (const bool in_forward : {true, false}) {
      run_threads(3, [&](const ProcessGroup& group) {
        expect_an_error_everywhere(group, unlucky, in_forward);
      });
    }
  }
}
TEST(RankPipeline, AFailureOfOneRankReachesAllOnProcesses) {
  run_ranks(3, [](const ProcessGroup& group) { expect_an_error_everywhere(group, 1, false); });
}

TEST(RankPipeline, WrongInputIsNamedOnAllRanksAndBreaksNothing) {
  run_threads(2, [](const ProcessGroup& group) {
    const bool first = group.rank() == 0;
    const auto own = stage_of(group.rank(), 2);
    const PipelineStage stage{*own, Device{}};
    const auto make = [&](const PipelineStage& its, const Pipeline::Loss& loss, int micro_batches) {
      return rank_pipeline_error_of<core::InvalidArgument>(
          [&] { RankPipeline(its, group, loss, {.micro_batches = micro_batches}); });
    };
    EXPECT_THAT(make(stage, {}, 4), HasSubstr("a loss function on the last rank, got none"));
    EXPECT_THAT(make(stage, rank_pipeline_loss_of, first ? 4 : 0),
                AllOf(HasSubstr(first ? "got on rank 1: " : "[pipeline] expected"),
                      HasSubstr("at least one micro-batch, got 0")));
    EXPECT_THAT(make(stage, rank_pipeline_loss_of, first ? 4 : 5),
                HasSubstr("got 4 micro-batches by one_forward_one_backward on rank 0 and 5"));
    const PipelineStage elsewhere{*own, Device{core::DeviceType::cpu, first ? 1 : 0}};
    EXPECT_THAT(make(elsewhere, rank_pipeline_loss_of, 4), HasSubstr("expected stage 0 on cpu:1"));

    RankPipeline pipeline(stage, group, rank_pipeline_loss_of);
    const auto run = [&](const Tensor& x, const Tensor& t) {
      return rank_pipeline_error_of<core::InvalidArgument>([&] { pipeline.train_step(x, t); });
    };
    EXPECT_THAT(run(rank_pipeline_batch(0, 1), rank_pipeline_batch(0, 2)),
                HasSubstr("one sample at least, got [0, 8]"));
    EXPECT_THAT(run({}, rank_pipeline_batch(4, 2)),
                AllOf(HasSubstr(first ? "[pipeline] expected" : "got on rank 0: "),
                      HasSubstr("got an undefined tensor")));
    EXPECT_THAT(run(rank_pipeline_batch(4, 1), {}),
                AllOf(HasSubstr(first ? "got on rank 1: " : "[pipeline] expected"),
                      HasSubstr("got an undefined tensor")));
    EXPECT_THAT(run(rank_pipeline_batch(4, 1), rank_pipeline_batch(3, 2)),
                HasSubstr("a target [4, ...] on the last rank, got 3"));
    {
      std::optional<autograd::NoGradGuard> no_grad;
      if (first) no_grad.emplace();
      EXPECT_THAT(run(rank_pipeline_batch(4, 1), rank_pipeline_batch(4, 2)),
                  HasSubstr("under no_grad"));
    }
    EXPECT_GT(step(pipeline, group, 4).item(), 0.0);
  });
}

// ---- A GPU for each rank: activations by NCCL, headers by the CPU's engine

const bool kPipelineGpus = setenv("CAIRN_SIM_GPUS", "3", 0) == 0;  // before the first call

Device gpu_of(int rank) {
  return {core::DeviceType::cuda, rank};
}
bool three_gpus() {
  return core::device_count(core::DeviceType::cuda) >= 3;
}

/// The pipeline of one process has its stages on the same GPUs.
void expect_the_same_bits_on_gpus(const ProcessGroup& group) {
  const int rank = group.rank(), ranks = group.world_size();
  for (const PipelineSchedule schedule : kRankPipelineSchedules) {
    for (const int micro_batches : {1, 3}) {
      const PipelineOptions options{micro_batches, schedule};
      std::vector<std::shared_ptr<nn::Sequential>> modules;
      std::vector<PipelineStage> list;
      for (int s = 0; s < ranks; ++s) {
        modules.push_back(stage_of(s, ranks));
        modules.back()->to(gpu_of(s));
        list.push_back({*modules.back(), gpu_of(s)});
      }
      Pipeline alone(list, rank_pipeline_loss_of, options);
      const auto own = stage_of(rank, ranks);
      own->to(gpu_of(rank));
      RankPipeline pipeline({*own, gpu_of(rank)}, group, rank_pipeline_loss_of, options);
      for (const std::int64_t samples : {7, 2}) {  // gradients are added up
        const Values loss =
            alone.train_step(rank_pipeline_batch(samples, 1), rank_pipeline_batch(samples, 2))
                .to_vector();
        EXPECT_EQ(step(pipeline, group, samples).to_vector(), loss) << micro_batches;
        EXPECT_EQ(gradients_of(*own), gradients_of(*modules[static_cast<std::size_t>(rank)]));
      }
      const Tensor y = pipeline(rank == 0 ? rank_pipeline_batch(7, 1) : Tensor());
      EXPECT_EQ(y.defined(), rank + 1 == ranks);
      if (!y.defined()) continue;
      EXPECT_EQ(y.device(), gpu_of(rank));
      test::expect_close(y.to_vector(),
                         (*layers(0, kLayers))(rank_pipeline_batch(7, 1)).to_vector(), 1e-5, 1e-6);
    }
  }
}

TEST(NcclRankPipeline, HasTheBitsOfOneProcess) {
  if (!three_gpus()) GTEST_SKIP() << "needs three GPUs";
  run_ranks(3, expect_the_same_bits_on_gpus);
}

TEST(NcclRankPipeline, AFailureOfOneRankReachesAll) {
  if (!three_gpus()) GTEST_SKIP() << "needs three GPUs";
  run_ranks(3, [](const ProcessGroup& group) {
    expect_an_error_everywhere(group, 1, false, gpu_of(group.rank()));
  });
}

// ---- The bubble, in a time that the activations and gradients carry: no clock of the machine's is
// read

/// Takes one unit of time in both directions, and begins when both its rank and its input are
/// ready.
struct Ticks {
  static constexpr autograd::OpInfo kInfo{"ticks"};
  double* now;  // this rank's
  Tensor end_of_unit(const Tensor& input) const {
    const Values times = input.to_vector();
    *now = std::max(*now, *std::max_element(times.begin(), times.end())) + 1;
    return Tensor::full(input.shape(), *now);
  }
  Tensor forward(autograd::Context& /*ctx*/, const Tensor& x, const Tensor& /*weight*/) const {
    return end_of_unit(x);
  }
  autograd::Tensors backward(autograd::Context& /*ctx*/, const Tensor& dy) const {
    return {end_of_unit(dy), Tensor::zeros({})};
  }
};

class Ticking : public nn::Module {
 public:
  std::string kind() const override { return "Ticking"; }
  Ticking() : weight_(add_parameter("weight", Tensor::zeros({}))) {}
  Tensor forward(const Tensor& x) override { return autograd::apply(Ticks{&now}, x, weight_); }
  double now = 0.0;

 private:
  Tensor weight_;
};

/// The share of all ranks' time in a step in which no stage worked.
double bubble_of(int ranks, int micro_batches, PipelineSchedule schedule) {
  std::mutex mutex;
  double end = 0.0;
  run_threads(ranks, [&](const ProcessGroup& group) {
    Ticking own;
    const auto loss = [](const Tensor& y, const Tensor&) { return autograd::mean(y); };
    RankPipeline pipeline({own, Device{}}, group, loss, {micro_batches, schedule});
    const bool first = group.rank() == 0, last = group.rank() + 1 == ranks;
    const Tensor none = Tensor::zeros({micro_batches, 1});
    pipeline.train_step(first ? none : Tensor(), last ? none : Tensor());
    const std::lock_guard lock(mutex);
    end = std::max(end, own.now);
  });
  return 1.0 - 2.0 * micro_batches / end;
}

TEST(RankPipeline, BubbleIsThatOfTheFormula) {
  for (const PipelineSchedule schedule : kRankPipelineSchedules) {
    for (const int ranks : {1, 2, 3, 5}) {
      for (const int m : {1, 2, 4, 8, 9}) {
        EXPECT_DOUBLE_EQ(bubble_of(ranks, m, schedule), (ranks - 1.0) / (m + ranks - 1.0))
            << ranks << " ranks, " << m << " micro-batches";
      }
    }
  }
}

}  // namespace
}  // namespace cairn::parallel
