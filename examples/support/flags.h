// The flags that every example has, and how a program of ours starts and ends.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/data/loader.h"
#include "cairn/observe/run.h"
#include "cairn/optim/schedule.h"
#include "cairn/parallel/distributed.h"
#include "command_line/command_line.h"

namespace support {

struct Flags {
  std::string opt_level = "O2";
  std::string half_dtype = "f16";
  std::optional<bool> keep_batchnorm_fp32;
  double loss_scale = 65536;  // where a dynamic one begins
  std::string device = "cpu";
  int epochs = 3;
  std::int64_t steps = 0;  // 0: as many as the epochs hold
  int batch_size = 50;     // per process and micro-batch
  int accumulate = 1;
  int shard = 0;         // ZeRO stage; 0: every process keeps all of the optimizer's state
  int shard_within = 0;  // processes that divide one copy; 0: all
  std::string optimizer = "adam";
  double lr = 1e-3;
  double weight_decay = 0;
  std::string schedule = "cosine";
  std::uint64_t seed = 1;
  std::string checkpoint_dir;
  int save_every = 100;
  std::string resume_from = "auto";
  std::string observe, observe_address;
  std::optional<cairn::observe::ProfiledSteps> profile;
  std::int64_t histogram_every = 0;  // 0: no histograms
  bool explain = false, detect_anomaly = false;

  /// Adds them to the program's command line; the values above (or changed before the call) are the
  /// defaults that --help shows.
  void add_to(CLI::App& app);
  void add_device_to(CLI::App& app);  // --device
  void add_observe_to(CLI::App& app);
  /// --shard and --shard-within, where a program's processes share one model.
  void add_shard_to(CLI::App& app);

  /// `units`: layers whose weights stage 3 gathers together; empty: those of the model.
  std::unique_ptr<cairn::parallel::DistributedDataParallel> data_parallel(
      cairn::nn::Module& model, const cairn::parallel::ProcessGroup& group,
      const std::vector<std::string>& units = {}) const;
  /// That of products.
  cairn::DType dtype() const;
  cairn::amp::Options amp_options(const cairn::World& world) const;
  std::shared_ptr<cairn::optim::Optimizer> make_optimizer(cairn::NamedTensors parameters) const;
  /// Optimizer steps of the whole run. Throws InvalidArgument where an epoch holds no batch.
  std::int64_t total_steps(const cairn::data::DataLoader& loader) const;
  cairn::optim::Curve learning_rate_curve(std::int64_t total_steps) const;

  /// The step to go on from: 0, or that of the checkpoint which --resume and --checkpoint-dir name.
  std::int64_t resume(cairn::checkpointing::TrainingState& state) const;
  bool save_due(std::int64_t step, std::int64_t total_steps) const;
  /// All of the program's, by their names: what runs are compared by.
  std::vector<std::pair<std::string, std::string>> hyperparameters(const cairn::World& world) const;
  /// "O2 f16; 2 process(es) on cpu:0; resumed at step 50"
  std::string describe(const cairn::World& world, cairn::Device device, std::int64_t step) const;

 private:
  const CLI::App* app_ = nullptr;  // of add_observe_to()
};

/// Parses the command line and runs `body`. Bad usage ends with status 2 and one line; an error
/// with status 1 and one line.
int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& body);
/// The same in the job this process was started in: the other ranks learn of an error too.
int run_program(CLI::App& app, int argc, char** argv,
                const std::function<int(const cairn::parallel::ProcessGroup&)>& body);

}  // namespace support
