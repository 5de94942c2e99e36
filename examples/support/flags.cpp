#include "support/flags.h"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <set>
#include <system_error>

#include "cairn/core/device.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/sharded.h"

namespace support {

using namespace cairn;

namespace {

observe::ProfiledSteps parse_steps(const std::string& text) {
  observe::ProfiledSteps steps;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, steps.first);
  const bool colon = first.ec == std::errc() && first.ptr != end && *first.ptr == ':';
  const auto last = colon ? std::from_chars(first.ptr + 1, end, steps.last) : first;
  const bool fits = colon && last.ec == std::errc() && last.ptr == end && steps.first > 0 &&
                    steps.first <= steps.last;
  if (fits) return steps;
  throw CLI::ValidationError("--profile", "expected steps FIRST:LAST, as 20:25, got " + text);
}

/// LARC needs an optimizer that stays where it is.
struct LarcSgd {
  LarcSgd(NamedTensors parameters, const optim::SgdOptions& options)
      : sgd(std::move(parameters), options) {}
  optim::FusedSGD sgd;
  optim::LARC larc{sgd};
};

}  // namespace

void Flags::add_to(CLI::App& app) {
  app.option_defaults()->always_capture_default();
  app.add_option("--opt-level", opt_level,
                 "precision: O0 (f32), O1 (autocast), O2 (half model, f32 masters), O3 (half)")
      ->check(CLI::IsMember({"O0", "O1", "O2", "O3"}));
  app.add_option("--half-dtype", half_dtype, "the half type of O1 - O3")
      ->check(CLI::IsMember({"f16", "bf16"}));
  app.add_option_function<std::string>(
         "--keep-batchnorm-fp32",
         [this](const std::string& keep) { keep_batchnorm_fp32 = keep != "false"; },
         "batch norm in f32: true (also without a value) or false (default: the level's)")
      ->expected(0, 1)
      ->check(CLI::IsMember({"true", "false"}))
      ->default_str("");
  app.add_option("--loss-scale", loss_scale, "where a dynamic loss scale begins")
      ->check(CLI::Range(1.0, 16777216.0));
  add_device_to(app);
  app.add_option("--epochs", epochs, "passes over the data")->check(CLI::Range(1, 1000000));
  app.add_option("--steps", steps, "end after this many optimizer steps; 0: after the epochs")
      ->check(command_line::not_below_zero());
  app.add_option("--batch-size", batch_size, "samples per process and micro-batch")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--accumulate", accumulate, "micro-batches per optimizer step")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--optimizer", optimizer,
                 "adam (AdamW), sgd (momentum 0.9), larc (around that) or lamb")
      ->check(CLI::IsMember({"adam", "sgd", "larc", "lamb"}));
  app.add_option("--lr", lr, "learning rate")->check(command_line::above_zero());
  app.add_option("--weight-decay", weight_decay, "of all parameters")
      ->check(command_line::not_below_zero());
  app.add_option(
         "--schedule", schedule,
         "of the learning rate: cosine (to 0 at the last step), steps (to a tenth after each "
         "third) or constant")
      ->check(CLI::IsMember({"cosine", "steps", "constant"}));
  app.add_option("--seed", seed, "of initialisation, order and data");
  app.add_option("--checkpoint-dir", checkpoint_dir,
                 "folder for checkpoints; none: nothing is saved. SIGTERM then saves and ends with "
                 "status 75; the next start goes on from there");
  app.add_option("--save-every", save_every, "steps between checkpoints")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option(
      "--resume", resume_from,
      "auto (continue what stands in the checkpoint folder), never, or a checkpoint's path");
  add_observe_to(app);
  app.add_flag(
         "--explain", explain,
         "watches three steps and shows, on the page, the precision of each operation and why")
      ->needs("--observe");
  app.add_flag("--detect-anomaly", detect_anomaly,
               "shows the first operation whose result is not finite, on the page; slow")
      ->needs("--observe");
}

void Flags::add_observe_to(CLI::App& app) {
  app_ = &app;
  CLI::Option* const folder = app.add_option(
      "--observe", observe,
      "folder for what the run tells: report.html (open it in a browser), metrics as JSON "
      "lines and CSV, for TensorBoard and for Prometheus");
  app.add_option("--observe-address", observe_address,
                 "where Prometheus may ask, 127.0.0.1:9464 (rank r: a port higher by r); beyond "
                 "the loopback interface with the token in CAIRN_OBSERVE_TOKEN")
      ->needs(folder);
  app.add_option_function<std::string>(
         "--profile", [this](const std::string& steps) { profile = parse_steps(steps); },
         "steps FIRST:LAST, traced into the folder of --observe: trace.perfetto-trace of all "
         "processes (open it at ui.perfetto.dev), trace.json of each")
      ->needs(folder)
      ->default_str("");
  app.add_option("--histograms", histogram_every,
                 "steps from one histogram of weights and gradients to the next, on the page and "
                 "for TensorBoard; 0: none")
      ->needs(folder)
      ->check(command_line::not_below_zero());
}

std::vector<std::pair<std::string, std::string>> Flags::hyperparameters(const World& world) const {
  const std::set<std::string> places{"help",    "observe", "observe-address", "checkpoint-dir",
                                     "resume",  "picture", "profile",         "export",
                                     "metrics", "device"};
  std::vector<std::pair<std::string, std::string>> values{
      {"processes", std::to_string(world.size)}};
  for (const CLI::Option* option : app_->get_options()) {
    if (option->get_lnames().empty() || places.contains(option->get_lnames().front())) continue;
    const std::string value =
        option->count() > 0 ? CLI::detail::join(option->results(), " ") : option->get_default_str();
    if (!value.empty()) values.emplace_back(option->get_lnames().front(), value);
  }
  return values;
}

void Flags::add_device_to(CLI::App& app) {
  app.add_option("--device", device,
                 "cpu, cuda or cuda:N; under cairn-run, cuda takes the process's local rank");
}

void Flags::add_shard_to(CLI::App& app) {
  app.add_option("--shard", shard,
                 "what the processes divide among each other: 0 nothing, 1 the optimizer's state "
                 "and f32 masters, 2 these and the gradients, 3 the weights too (ZeRO)")
      ->check(CLI::Range(0, 3));
  app.add_option("--shard-within", shard_within,
                 "so many neighbours divide one copy, and others have copies; 0: all divide one");
}

std::unique_ptr<parallel::DistributedDataParallel> Flags::data_parallel(
    nn::Module& model, const parallel::ProcessGroup& group,
    const std::vector<std::string>& units) const {
  CAIRN_CHECK(shard > 0 || shard_within == 0, "train", "expected --shard-within ", shard_within,
              " with --shard 1, 2 or 3, got it without");
  if (shard == 0) return std::make_unique<parallel::DistributedDataParallel>(model, group);
  parallel::ShardedOptions options{.stage = static_cast<parallel::ZeroStage>(shard),
                                   .shard_within = shard_within};
  if (options.stage == parallel::ZeroStage::parameters) options.units = units;
  return std::make_unique<parallel::ShardedDataParallel>(model, group, options);
}

DType Flags::dtype() const {
  return opt_level == "O0" ? DType::f32 : core::parse_dtype(half_dtype);
}

amp::Options Flags::amp_options(const World& world) const {
  amp::Options options;
  options.opt_level = amp::parse_opt_level(opt_level);
  options.half_dtype = core::parse_dtype(half_dtype);
  options.keep_batchnorm_fp32 = keep_batchnorm_fp32;
  options.scaler.init_scale = loss_scale;
  options.world = world;
  return options;
}

std::shared_ptr<optim::Optimizer> Flags::make_optimizer(NamedTensors parameters) const {
  const optim::SgdOptions sgd{.lr = lr, .momentum = 0.9, .weight_decay = weight_decay};
  if (optimizer == "sgd") return std::make_shared<optim::FusedSGD>(std::move(parameters), sgd);
  if (optimizer == "larc") {
    const auto both = std::make_shared<LarcSgd>(std::move(parameters), sgd);
    return {both, &both->sgd};
  }
  if (optimizer == "lamb")
    return std::make_shared<optim::FusedLAMB>(
        std::move(parameters),
        optim::LambOptions{.lr = lr, .weight_decay = weight_decay, .use_nvlamb = true});
  return std::make_shared<optim::FusedAdam>(
      std::move(parameters), optim::AdamOptions{.lr = lr, .weight_decay = weight_decay});
}

std::int64_t Flags::total_steps(const data::DataLoader& loader) const {
  CAIRN_CHECK(loader.batches_per_epoch() > 0, "train", "expected at least one batch of ",
              batch_size, " samples per process and epoch, got fewer samples (lower --batch-size)");
  if (steps > 0) return steps;
  return std::max<std::int64_t>(1, epochs * loader.batches_per_epoch() / accumulate);
}

optim::Curve Flags::learning_rate_curve(std::int64_t total_steps) const {
  if (schedule == "steps") return optim::step_decay(std::max<std::int64_t>(1, total_steps / 3));
  return schedule == "cosine" ? optim::cosine(total_steps) : optim::constant();
}

std::int64_t Flags::resume(checkpointing::TrainingState& state) const {
  if (resume_from == "never" || (resume_from == "auto" && checkpoint_dir.empty())) return 0;
  if (resume_from != "auto") return state.resume(resume_from).step;
  const auto found = state.resume_latest(checkpoint_dir);
  return found ? found->step : 0;
}

bool Flags::save_due(std::int64_t step, std::int64_t total_steps) const {
  return !checkpoint_dir.empty() && (step % save_every == 0 || step == total_steps);
}

std::string Flags::describe(const World& world, Device device, std::int64_t step) const {
  return core::str(opt_level, " ", half_dtype, "; ", world.size, " process(es) on ", device,
                   shard > 0 ? core::str("; ZeRO stage ", shard) : "",
                   shard_within > 0 ? core::str(" within ", shard_within) : "",
                   step > 0 ? core::str("; resumed at step ", step) : "");
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& body) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    std::cerr << app.get_name() << ": " << command_line::explain(app, error) << " (see "
              << app.get_name() << " --help)\n";
    return 2;
  }
  try {
    return body();
  } catch (const std::exception& error) {
    std::cerr << app.get_name() << ": " << error.what() << "\n";
    return 1;
  }
}

int run_program(CLI::App& app, int argc, char** argv,
                const std::function<int(const parallel::ProcessGroup&)>& body) {
  return run_program(app, argc, argv, [&] {
    const auto group = parallel::ProcessGroup::from_environment();
    return group.run([&] { return body(group); });
  });
}

}  // namespace support
