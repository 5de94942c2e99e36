#include <cstdint>
#include <deque>
#include <exception>
#include <string>
#include <tuple>
#include <utility>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/parallel/pipeline.h"
#include "pipeline/schedule.h"
#include "pipeline/stage_run.h"

namespace cairn::parallel {
namespace {

/// What is said ahead of a tensor, or instead of one.
struct TensorHeader {
  static constexpr std::int64_t kNumbers = 4 + 2 * core::kMaxDims;

  TensorHeader() : numbers(Tensor::zeros({kNumbers}, DType::i64, Device{})) {}
  std::int64_t& at(int i) const { return numbers.view().as<std::int64_t>()[i]; }
  std::int64_t& defined() const { return at(0); }
  std::int64_t& needs_gradient() const { return at(1); }
  std::int64_t& dtype() const { return at(2); }
  std::int64_t& dims() const { return at(3); }

  void describe(const Tensor& x) const {
    defined() = 1;
    dtype() = static_cast<std::int64_t>(x.dtype());
    dims() = x.dims();
    for (int d = 0; d < x.dims(); ++d) {
      at(4 + 2 * d) = x.size(d);
      at(5 + 2 * d) = x.strides()[d];
    }
  }
  Tensor make(Device device) const {
    Shape shape;
    Strides strides;
    for (int d = 0; d < dims(); ++d) {
      shape.push_back(at(4 + 2 * d));
      strides.push_back(at(5 + 2 * d));
    }
    return Tensor::empty_strided(shape, strides, static_cast<DType>(dtype()), device);
  }

  Tensor numbers;
};

/// Tensors in one direction between two ranks, which are a group: what goes the other way never
/// waits for it.
class OneWay {
 public:
  OneWay(ProcessGroup pair, Device device) : pair_(std::move(pair)), device_(device) {}
  ~OneWay() { wait_quietly(); }  // what is being sent must not end before
  OneWay(const OneWay&) = delete;
  OneWay& operator=(const OneWay&) = delete;

  /// Returns at once; x, undefined or not, is left alone until it is sent.
  void send(const Tensor& x, bool needs_gradient) {
    while (!under_way_.empty() && under_way_.front().work.done()) under_way_.pop_front();
    const TensorHeader header;
    header.needs_gradient() = needs_gradient ? 1 : 0;
    const Tensor dense = !x.defined() || x.view().is_dense() ? x : autograd::contiguous(x);
    if (dense.defined()) header.describe(dense);
    const auto send_of = [&](const Tensor& tensor, const char* name) {
      under_way_.push_back(
          {pair_.async(tensor.device(), [&] { pair_.send(tensor, other(), 0, name); }), tensor});
    };
    send_of(header.numbers, "pipeline's header");
    if (dense.defined() && dense.numel() > 0) send_of(dense, "pipeline's tensor");
  }

  std::pair<Tensor, bool> receive() {
    const TensorHeader header;
    pair_.recv(header.numbers, other(), 0, "pipeline's header");
    if (header.defined() == 0) return {Tensor(), false};
    const Tensor x = header.make(device_);
    if (x.numel() > 0) pair_.recv(x, other(), 0, "pipeline's tensor");
    return {x, header.needs_gradient() != 0};
  }

  void wait() {
    for (; !under_way_.empty(); under_way_.pop_front()) under_way_.front().work.wait();
  }

 private:
  void wait_quietly() noexcept {
    for (; !under_way_.empty(); under_way_.pop_front()) {
      try {
        under_way_.front().work.wait();
      } catch (const std::exception&) {  // told by whoever waited before
      }
    }
  }
  struct Sending {
    Work work;
    Tensor tensor;
  };
  int other() const { return 1 - pair_.rank(); }

  ProcessGroup pair_;
  Device device_;
  std::deque<Sending> under_way_;
};

void check_none(const std::string& problem) {
  if (!problem.empty()) core::fail("pipeline", problem);
}

const char* name_of(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::gpipe ? "gpipe" : "one_forward_one_backward";
}

Tensor scalar(const Tensor& loss) {
  const autograd::NoGradGuard no_grad;
  return autograd::reshape(autograd::to(loss, DType::f32), {});
}

/// The ranks on both ends of edge `edge` (between stages edge and edge + 1) as a group of their
/// own. A collective of all ranks, for the even edges or for the odd ones.
ProcessGroup pair_of(const ProcessGroup& group, int parity, Device device) {
  const int edge = group.rank() % 2 == parity ? group.rank() : group.rank() - 1;
  ProcessGroup pair = group.split(edge + 1, 0, "pipeline");
  pair.barrier("pipeline");  // connects the CPU's engine, which headers take
  if (device.is_cuda()) pair.all_reduce(Tensor::zeros({1}, DType::f32, device));
  return pair;
}

}  // namespace

/// Both directions between a rank and its neighbour.
class RankPipeline::Link {
 public:
  Link(ProcessGroup activations_pair, ProcessGroup gradients_pair, Device device)
      : activations(std::move(activations_pair), device),
        gradients(std::move(gradients_pair), device) {}
  void wait() {
    activations.wait();
    gradients.wait();
  }
  OneWay activations, gradients;
};

/// A rank's part in one step.
class RankPipeline::Step {
 public:
  Step(RankPipeline& own, const Tensor& x, const Tensor& target, const MicroBatches& micro_batches)
      : x_(x),
        before_(own.before_.get()),
        after_(own.after_.get()),
        micro_batches_(micro_batches),
        loss_(own.loss_, target, micro_batches),
        run_(own.stage_, micro_batches.count),
        sends_back_(static_cast<std::size_t>(micro_batches.count), false) {}

  void run(const PipelineTask& task) {
    task.backward ? backward(task.micro_batch) : forward(task.micro_batch);
  }
  const Tensor& mean_loss() const { return loss_.mean(); }

 private:
  void forward(int m) {
    Tensor x;
    bool sends_back = false;
    if (before_ == nullptr) {
      x = micro_batches_.part(x_, m);
    } else {
      std::tie(x, sends_back) = before_->activations.receive();
    }
    sends_back_[static_cast<std::size_t>(m)] = sends_back;
    const Tensor output = run_.forward(m, x, sends_back);
    if (after_ != nullptr) {
      after_->activations.send(output.detach(), output.requires_grad());
    } else {
      run_.replace_output(m, loss_.add(m, output));
    }
  }

  void backward(int m) {
    const bool needed = run_.needs_gradient(m);
    const Tensor dy = needed && after_ != nullptr ? after_->gradients.receive().first : Tensor();
    const bool reached = needed && (after_ == nullptr || dy.defined());
    Tensor dx;
    if (reached) {
      dx = run_.backward(m, dy);
    } else {
      run_.drop(m);  // frozen
    }
    if (sends_back_[static_cast<std::size_t>(m)]) before_->gradients.send(dx, false);
  }

  const Tensor& x_;
  Link *before_, *after_;
  const MicroBatches& micro_batches_;
  MeanLoss loss_;
  StageRun run_;
  std::vector<bool> sends_back_;  // by micro-batch
};

RankPipeline::RankPipeline(PipelineStage stage, ProcessGroup group, Pipeline::Loss loss,
                           const PipelineOptions& options)
    : stage_(stage), group_(std::move(group)), loss_(std::move(loss)), options_(options) {
  agree_on_options();
  for (const int parity : {0, 1}) {
    ProcessGroup activations = pair_of(group_, parity, stage_.device);
    ProcessGroup gradients = pair_of(group_, parity, stage_.device);
    if (activations.world_size() == 1) continue;  // at an end of the pipeline
    auto& link = activations.rank() == 0 ? after_ : before_;
    link = std::make_unique<Link>(std::move(activations), std::move(gradients), stage_.device);
  }
}

RankPipeline::~RankPipeline() = default;

void RankPipeline::agree_on_options() const {
  const auto all = group_.world().all_or_throw("pipeline", [&] {
    const bool last = group_.rank() + 1 == group_.world_size();
    CAIRN_CHECK(loss_ || !last, "pipeline", "expected a loss function on the last rank, got none");
    CAIRN_CHECK(options_.micro_batches > 0, "pipeline", "expected at least one micro-batch, got ",
                options_.micro_batches);
    core::check_exists(stage_.device);
    check_none(problem_of_stage(stage_, static_cast<std::size_t>(group_.rank())));
    return core::str(options_.micro_batches, " micro-batches by ", name_of(options_.schedule));
  });
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    CAIRN_CHECK(all[rank] == all[0], "pipeline", "expected the same options on all ranks, got ",
                all[0], " on rank 0 and ", all[rank], " on rank ", rank);
  }
}

std::int64_t RankPipeline::agree_on_samples(const Tensor& x, const Tensor& target) const {
  std::string targets;
  const auto all = group_.world().all_or_throw("pipeline", [&] {
    const bool first = before_ == nullptr, last = after_ == nullptr;
    check_none(problem_of_grad_mode());
    check_none(problem_of_stage(stage_, static_cast<std::size_t>(group_.rank())));
    if (first) check_none(problem_of_batch("x", x));
    if (last) {
      check_none(problem_of_batch("target", target));
      targets = std::to_string(target.size(0));
    }
    return first ? std::to_string(x.size(0)) : targets;
  });
  const std::string& of_target = group_.world_size() == 1 ? targets : all.back();
  CAIRN_CHECK(all[0] == of_target, "pipeline", "expected a target [", all[0],
              ", ...] on the last rank, got ", of_target, " samples");
  return std::stoll(all[0]);
}

/// What a rank cannot go on after, the others hear at once.
void RankPipeline::guarded(const std::function<void()>& work) {
  try {
    work();
    for (Link* link : {before_.get(), after_.get()}) {
      if (link != nullptr) link->wait();
    }
  } catch (const std::exception& error) {
    break_gradients(stage_, error.what());
    const bool heard = dynamic_cast<const core::CommunicationError*>(&error) != nullptr;
    if (!heard) group_.abort(core::str("pipeline stage ", group_.rank(), ": ", error.what()));
    throw;
  }
}

Tensor RankPipeline::train_step(const Tensor& x, const Tensor& target) {
  const MicroBatches micro_batches(agree_on_samples(x, target), options_.micro_batches);
  const int rank = group_.rank(), stages = group_.world_size();
  Tensor mean = Tensor::zeros({}, DType::f32, stage_.device);
  guarded([&] {
    Step step(*this, x, target, micro_batches);
    for (const auto& task : stage_tasks(rank, stages, micro_batches.count, options_.schedule)) {
      step.run(task);
    }
    if (after_ == nullptr) mean = scalar(step.mean_loss());
    // No broadcast: nobody may end the step before all have.
    group_.all_reduce(mean, ReduceOp::sum, "pipeline's loss");
  });
  report_ = report_of(plan_pipeline(stages, micro_batches.count, options_.schedule), stages,
                      micro_batches.count);
  return mean;
}

Tensor RankPipeline::operator()(const Tensor& x) {
  const autograd::NoGradGuard no_grad;
  const core::DefaultDeviceGuard here(stage_.device);
  Tensor y;
  guarded([&] {
    const Tensor from = before_ != nullptr ? before_->activations.receive().first : x;
    CAIRN_CHECK(from.defined(), "pipeline",
                "expected x on the first rank, got an undefined tensor");
    y = stage_.module(autograd::to(from, stage_.device));
    if (after_ != nullptr) after_->activations.send(std::exchange(y, {}), false);
  });
  return y;
}

}  // namespace cairn::parallel
