// What a stage of a pipeline does with micro-batches, wherever its neighbours are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cairn/parallel/pipeline.h"

namespace cairn::parallel {

/// n samples in parts of `each`, the last one shorter where they do not divide.
struct MicroBatches {
  MicroBatches(std::int64_t samples, int wanted)
      : n(samples),
        each((n + wanted - 1) / wanted),
        count(static_cast<int>((n + each - 1) / each)) {}
  Tensor part(const Tensor& x, int m) const {
    const std::int64_t begin = each * m;
    return x.alias(x.view().slice(0, begin, std::min(begin + each, n)));
  }
  std::int64_t n, each;
  int count;
};

/// One stage in one step. Its graphs end at its inputs, so each backward is its own.
class StageRun {
 public:
  StageRun(const PipelineStage& stage, int micro_batches)
      : stage_(stage), ends_(static_cast<std::size_t>(micro_batches)) {}

  /// `x` comes without a graph; sends_back: the stage before wants its gradient.
  const Tensor& forward(int micro_batch, const Tensor& x, bool sends_back);
  /// What the stage's output becomes before its backward begins there: the loss.
  void replace_output(int micro_batch, const Tensor& loss) { ends(micro_batch).output = loss; }
  /// Whether a gradient of that output is of use.
  bool needs_gradient(int micro_batch) { return ends(micro_batch).output.requires_grad(); }
  /// dy: of the output; undefined for a loss. The input's gradient; undefined: there is none.
  Tensor backward(int micro_batch, const Tensor& dy);
  /// Ends a micro-batch that has no backward.
  void drop(int micro_batch) { ends(micro_batch) = {}; }

 private:
  /// Kept between forward and backward.
  struct Ends {
    Tensor input, output;
  };
  Ends& ends(int micro_batch) { return ends_[static_cast<std::size_t>(micro_batch)]; }

  const PipelineStage& stage_;
  std::vector<Ends> ends_;
};

/// The mean loss over a batch's samples, micro-batch by micro-batch.
class MeanLoss {
 public:
  MeanLoss(const Pipeline::Loss& loss, const Tensor& target, const MicroBatches& micro_batches)
      : loss_(loss), target_(target), micro_batches_(micro_batches) {}
  /// The micro-batch's share of the mean, with its graph.
  Tensor add(int micro_batch, const Tensor& output);
  const Tensor& mean() const { return total_; }

 private:
  const Pipeline::Loss& loss_;
  const Tensor& target_;
  const MicroBatches& micro_batches_;
  Tensor total_;
};

// What is wrong ahead of a step; "": nothing.
/// x [N, ...] has a sample at least.
std::string problem_of_batch(const char* name, const Tensor& x);
std::string problem_of_grad_mode();
/// Parameters of stage s lie on its device.
std::string problem_of_stage(const PipelineStage& stage, std::size_t s);
/// Throws InvalidArgument with the problem where there is one.
void check(const std::string& problem);

/// The next step refuses what some micro-batches have added.
void break_gradients(const PipelineStage& stage, const char* error);

}  // namespace cairn::parallel
