// What a person and a script see of a training run: a progress bar (plain lines where the output is
// no terminal), a final table, and what cairn::observe writes.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/amp/anomaly.h"
#include "cairn/amp/explain.h"
#include "cairn/core/status.h"
#include "cairn/core/world.h"
#include "cairn/nn/module.h"
#include "cairn/observe/run.h"
#include "cairn/optim/optimizer.h"
#include "support/flags.h"
#include "support/machine_share.h"
#include "support/throughput.h"

namespace support {

struct StepMetrics {
  std::int64_t step = 0;
  double lr = 0, loss_scale = 1;
  std::int64_t units = 0;        // images or tokens in this step, over all processes
  std::size_t memory_bytes = 0;  // peak of live tensors
  cairn::optim::StepResult result;
};

/// Of the run that --observe asks for.
struct RunOf {
  cairn::World world;
  cairn::Device device;
  std::string description;
  std::int64_t first_step = 0;
};
cairn::observe::RunOptions run_options(const Flags& flags, const RunOf& run);

class Reporter {
 public:
  struct Options {
    cairn::World world;  // rank 0 reports, the others keep quiet
    cairn::Device device;
    std::string description;  // the first line
    std::string unit = "images";
    std::int64_t first_step = 0, total_steps = 0;
    bool accuracy = true;
  };
  /// flags: what is observed, and where to.
  Reporter(const Flags& flags, const Options& options);
  ~Reporter();

  /// Of one micro-batch; step() reports the means over those since the last step.
  void micro_batch(double loss, double accuracy = 0);
  /// Between the last micro-batch and the step: of weights and gradients, in the steps that
  /// --histograms asks for.
  void histograms(const cairn::nn::Module& model);
  void step(const StepMetrics& metrics);
  void saved(std::int64_t step);       // a checkpoint
  void note(const std::string& line);  // a line of its own, above the bar
  /// Ends the bar, prints the table and, where ranks differ, a line for each; the numbers are the
  /// run's summary. A collective.
  void finish(const std::vector<std::pair<std::string, double>>& numbers,
              const std::vector<std::pair<std::string, std::string>>& texts);

  /// Units (images or tokens) over the last steps.
  double per_second() const { return throughput_.per_second(); }
  /// For spans; null: nobody observes.
  cairn::observe::Run* run() { return run_ ? &*run_ : nullptr; }

 private:
  void draw(const StepMetrics& metrics);
  void tell(const StepMetrics& metrics, double loss, double accuracy);
  void show_watched(std::int64_t step);
  std::string time_left(const StepMetrics& metrics) const;
  std::string first_uses();
  std::vector<std::string> lines_of_ranks() const;
  Options options_;
  bool draws_histograms_;
  std::optional<cairn::observe::Run> run_;
  bool terminal_ = false, bar_shown_ = false;
  Throughput throughput_;
  std::optional<MachineShare> machine_share_;  // where there is a run
  // Observers of this thread's operations: those that began later end first.
  std::optional<cairn::amp::AnomalyMode> anomaly_;
  std::optional<cairn::amp::Explain> explain_;
  double share_ = 0;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now(), last_drawn_;
  double waited_before_ = cairn::core::waited_for_ranks();
  std::int64_t shown_ = 0, primitives_ = 0;
  int micro_batches_ = 0;
  double loss_sum_ = 0, accuracy_sum_ = 0;
  double smooth_loss_ = 0, smooth_accuracy_ = 0;
};

std::string human_bytes(std::size_t bytes);

}  // namespace support
