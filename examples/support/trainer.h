// The training loop that the examples share: process group, opt level, data parallelism,
// accumulation, checkpoints, progress. trainer.cpp is the place to read how Cairn's parts are put
// together.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cairn/data/loader.h"
#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"
#include "support/flags.h"
#include "support/reporter.h"

namespace support {

struct Task {
  cairn::nn::Module& model;
  const cairn::data::Dataset& train;
  std::string description;  // printed first
  std::optional<cairn::data::Normalize> normalize = {};
  std::string unit = "images";
  std::int64_t units_per_sample = 1;
  bool accuracy = true;  // report the share of right argmaxes
};

class Trainer {
 public:
  Trainer(const Flags& flags, Task task);
  /// Trains to the last step, continuing a checkpoint where there is one.
  void run();

  cairn::parallel::ProcessGroup& group() { return group_; }
  cairn::Device device() const { return device_; }
  Reporter& reporter() { return *reporter_; }
  std::int64_t step() const { return step_; }

 private:
  struct Parts;
  std::int64_t total_steps(const cairn::data::DataLoader& loader) const;
  std::int64_t resume(Parts& parts);
  void micro_batch(Parts& parts, const cairn::data::Batch& batch);
  void optimizer_step(Parts& parts);

  Flags flags_;
  Task task_;
  cairn::parallel::ProcessGroup group_;
  cairn::Device device_;
  std::unique_ptr<Reporter> reporter_;
  std::int64_t step_ = 0, total_steps_ = 0;
  double loss_sum_ = 0, accuracy_sum_ = 0;
};

/// Share of rows whose argmax is the label. logits [..., V], labels [...].
double accuracy(const cairn::Tensor& logits, const cairn::Tensor& labels);

}  // namespace support
