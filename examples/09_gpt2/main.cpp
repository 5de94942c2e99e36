// gpt2: fine-tunes GPT-2 from Hugging Face's files (model.safetensors, config.json, tokenizer.json)
// on a text, within a budget of the process's memory, or of a GPU's, and exports it to the same
// layout.
//
//   gpt2 --write-random random    weights of 124M parameters, where the real ones are not to be had
//   gpt2 --model random --text plays.txt --steps 10 --budget 3G --export tuned
//   cairn-run --nproc-per-node 4 gpt2 --model random --text plays.txt --shard 2 --budget 1500M
//   cairn-run --nproc-per-node 4 gpt2 --model random --text plays.txt --plan --budget 1500M
//   gpt2 --model random --text plays.txt --device cuda --budget 4G
//   python3 compare.py tuned logits.safetensors    PyTorch's own logits (gpt2 --logits wrote ours)
//
// Without a tokenizer.json each byte of the text is a token: GPT-2's own of the 256 bytes.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/data/loader.h"
#include "cairn/data/text.h"
#include "cairn/nn/deferred_init.h"
#include "cairn/optim/adam.h"
#include "model.h"
#include "support/flags.h"
#include "support/machine_share.h"
#include "support/reporter.h"

namespace {

using namespace cairn;

constexpr const char* kHost = "host";  // of --offload

struct Flags {
  std::string write_random, model, offload, export_to, logits;
  std::vector<std::string> text;
  gpt2::Config config;
  std::uint64_t budget = std::uint64_t{3} << 30, seed = 1;
  int steps = 10, batch_size = 4, micro_batches = 0;
  std::int64_t tokens = 256;
  double lr = 1e-4;
  bool recompute = false, full_state = false, plan = false;
  std::uint64_t bandwidth = 0;
  support::Flags common;  // of them: opt level, half dtype, device, sharding, observe

  void add_to(CLI::App& app) {
    common.half_dtype = "bf16";
    app.option_defaults()->always_capture_default();
    app.add_option("--model", model,
                   "folder with model.safetensors, config.json and, unless a byte is a token, "
                   "tokenizer.json");
    app.add_option("--text", text, "text files to learn")->check(CLI::ExistingFile);
    app.add_option("--steps", steps, "optimizer steps; 0: none")->check(CLI::Range(0, 1 << 20));
    app.add_option("--batch-size", batch_size, "windows of a step and process")
        ->check(CLI::Range(1, 1 << 16));
    app.add_option("--micro-batches", micro_batches,
                   "in so many parts; 0: as many as the budget asks for (of several processes: 1)")
        ->check(CLI::Range(0, 1 << 16));
    app.add_option("--tokens", tokens, "tokens of a window")->check(CLI::Range(2, 1 << 16));
    app.add_option("--lr", lr, "learning rate of AdamW")->check(command_line::above_zero());
    app.add_option("--opt-level", common.opt_level, "precision: O0, O1, O2 or O3")
        ->check(CLI::IsMember({"O0", "O1", "O2", "O3"}));
    app.add_option("--half-dtype", common.half_dtype, "the half type of O1 - O3")
        ->check(CLI::IsMember({"f16", "bf16"}));
    common.add_device_to(app);
    app.add_flag("--full-state", full_state,
                 "masters and moments in f32, not as bf16 with 16-bit remainders");
    app.add_flag("--recompute", recompute,
                 "blocks keep their inputs only, even where more would fit");
    app.add_option("--offload", offload,
                   "masters and moments in files of this folder or, of a GPU, on the 'host'")
        ->check(CLI::ExistingDirectory | CLI::IsMember({kHost}));
    common.add_shard_to(app);
    common.add_observe_to(app);
    app.add_flag("--plan", plan,
                 "chooses the fastest of --shard, --micro-batches, what is recomputed and whether "
                 "states go to --offload's folder, or to a GPU's host, that is predicted to fit, "
                 "and says why");
    app.add_option("--bandwidth", bandwidth,
                   "bytes a second that a process sends to the others, for --plan; 0: measured")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
    app.add_option("--budget", budget, "memory of each process, on a GPU of its tensors there: 3G")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
        ->default_str("3G");
    app.add_option("--export", export_to, "folder for the fine-tuned model; none: not written");
    app.add_option("--logits", logits, "file for the tokens and f32 logits of one window");
    app.add_option("--seed", seed, "of the order of windows, and of random weights");
    app.add_option("--write-random", write_random,
                   "writes random weights to this folder, and ends");
    app.add_option("--layers", config.layers, "of random weights")->check(CLI::Range(1, 1000));
    app.add_option("--heads", config.heads, "of random weights")->check(CLI::Range(1, 1000));
    app.add_option("--width", config.width, "of random weights")->check(CLI::Range(1, 1 << 16));
    app.add_option("--positions", config.positions, "of random weights")
        ->check(CLI::Range(2, 1 << 16));
    app.add_option("--words", config.words, "of random weights")->check(CLI::Range(256, 1 << 24));
  }
};

/// GPT-2's tokens of the 256 bytes: printable ones first, in their order.
std::array<std::int64_t, 256> byte_tokens() {
  std::array<std::int64_t, 256> tokens{};
  const auto printable = [](int byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 255 && byte != 173);
  };
  std::int64_t next = 0;
  for (const bool wanted : {true, false}) {
    for (int byte = 0; byte < 256; ++byte) {
      if (printable(byte) == wanted) tokens[static_cast<std::size_t>(byte)] = next++;
    }
  }
  return tokens;
}

/// The model's, on its device, of a text's.
Tensor to_tokens(const Tensor& read, const data::Vocabulary& vocabulary) {
  static const auto table = byte_tokens();
  std::vector<std::int64_t> tokens = read.to_vector<std::int64_t>();
  if (vocabulary.unit() == data::TextUnit::bytes) {
    for (std::int64_t& token : tokens) token = table[static_cast<std::size_t>(token)];
  }
  return Tensor::from(tokens, read.shape(), DType::i64);
}

std::string rounded(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

/// Of several processes the first speaks.
void say(const World& world, const std::string& line) {
  if (world.rank == 0) std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

/// How a step is cut so that it fits.
struct Way {
  bool recompute = false;  // blocks keep their inputs only
  int parts = 1;           // micro-batches

  std::string text() const {
    const std::string kept = recompute ? "recomputed blocks" : "every activation kept";
    return parts == 1 ? kept : core::str(kept, ", ", parts, " micro-batches");
  }
};

/// One pass over a batch's tokens [B, T]; returns the mean loss. Gradients are added up. `loss_of`
/// is a module, or one whose gradients ranks average: those of the last part, and what they were
/// added to.
template <class LossOf>
double backward_through(LossOf& loss_of, amp::Amp& precision, const Tensor& tokens,
                        const Tensor& next, int parts, const World& world = {},
                        observe::Run* run = nullptr) {
  const std::int64_t n = tokens.size(0);
  double loss = 0.0;
  for (std::int64_t k = 0; k < parts; ++k) {
    const std::int64_t begin = n * k / parts, end = n * (k + 1) / parts;
    const double share = static_cast<double>(end - begin) / static_cast<double>(n);
    const auto region = precision.region();
    observe::Span span(run, "forward");
    world.synchronize(k + 1 == parts);
    const Tensor mean = loss_of(autograd::stack(
        {autograd::slice(tokens, 0, begin, end), autograd::slice(next, 0, begin, end)}));
    span.next("backward");
    precision.backward(mean, {.weight = share});
    loss += mean.item() * share;
  }
  return loss;
}

std::int64_t count_of(const nn::Module& model) {
  std::int64_t count = 0;
  for (const auto& [name, parameter] : model.parameters()) count += parameter.numel();
  return count;
}

/// The first way whose step fits below the cap, tried on a batch of nothing: plain, recomputed, in
/// more and more micro-batches. Throws core::OutOfMemory.
Way fitting_way(gpt2::NextTokenLoss& model, amp::Amp& precision, const optim::FusedAdam& optimizer,
                const Flags& flags) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  const bool compact = optimizer.state_options().moments == DType::bf16;
  const bool elsewhere =
      !optimizer.state_options().folder.empty() || optimizer.state_options().on_host;
  const Tensor moments =
      Tensor::empty({elsewhere ? 0 : 2 * count_of(model)}, compact ? DType::bf16 : DType::f32);
  const Tensor tokens = Tensor::zeros({flags.batch_size, flags.tokens}, DType::i64);
  Way way{flags.recompute, std::max(1, flags.micro_batches)};
  for (;; way.recompute = true) {
    if (way.parts > 1) optim::GradientArena::attach(model.parameters(), true);  // sums in f32
    model.recompute = way.recompute;
    try {
      backward_through(model, precision, tokens, tokens, way.parts);
      model.clear_grad();
      core::release_cached_memory(core::default_device());
      return way;
    } catch (const core::OutOfMemory&) {
      model.clear_grad();
      if (way.recompute && 2 * way.parts > flags.batch_size) throw;
    }
    std::printf("%s: does not fit\n", way.text().c_str());
    if (way.recompute) way.parts *= 2;
  }
}

/// Live tensors may have what the program leaves of the budget: of a GPU's, all.
void cap_memory(std::uint64_t budget) {
  const Device device = core::default_device();
  if (device.is_cuda()) return core::set_memory_capacity(device, budget);
  constexpr std::size_t kLibraries = std::size_t{40} << 20;  // what they still load and keep
  const std::size_t taken = core::process_memory("VmRSS") + kLibraries;
  CAIRN_CHECK(budget > taken, "gpt2", "expected a --budget over ", support::human_bytes(taken),
              ", which the program takes, got ", support::human_bytes(budget));
  core::set_memory_capacity(device, budget - taken);
}

/// What the budget bounds, at most so far.
std::size_t most_memory() {
  const Device device = core::default_device();
  return device.is_cuda() ? core::memory_stats(device).peak_total : core::process_memory("VmHWM");
}

void tell(observe::Run& run, const optim::StepResult& result, double loss, double loss_scale,
          double tokens_per_second, double machine_share) {
  if (!result.applied) run.event(observe::EventKind::skip, result.reason, result.culprit);
  run.step({{"loss", loss},
            {"loss_scale", loss_scale},
            {"gradient_norm", result.gradient_norm},
            {"tokens_per_second", tokens_per_second},
            {"machine_share", machine_share}});
}

template <class LossOf>
void take_steps(LossOf& loss_of, const nn::Module& model, amp::Amp& precision,
                const data::TextDataset& text, const Way& way, const Flags& flags,
                const World& world) {
  data::DistributedSampler sampler(text.size(), {.world = world, .seed = flags.seed});
  data::DataLoader loader(text, sampler, {.batch_size = flags.batch_size, .drop_last = true});
  CAIRN_CHECK(loader.batches_per_epoch() > 0, "gpt2", "expected ", flags.batch_size,
              " windows of text for each process, got fewer (shorter --tokens, more --text)");
  std::optional<observe::Run> observed;
  if (!flags.common.observe.empty()) {
    observed.emplace(
        flags.common.observe,
        support::run_options(flags.common, {world, core::default_device(), way.text()}));
  }
  observe::Run* const run = observed ? &*observed : nullptr;
  std::optional<support::MachineShare> machine_share;
  if (run != nullptr) machine_share.emplace(core::default_device(), flags.common.dtype());
  const double tokens = static_cast<double>(flags.batch_size * flags.tokens * world.size);
  observe::Span part(run, "data");
  for (int step = 1; step <= flags.steps;) {
    for (const data::Batch& batch : loader) {
      const auto start = std::chrono::steady_clock::now();
      const Tensor inputs = to_tokens(batch.inputs, text.vocabulary()),
                   next = to_tokens(batch.labels, text.vocabulary());
      const double own = backward_through(loss_of, precision, inputs, next, way.parts, world, run);
      if (flags.common.histogram_every > 0 && run != nullptr) run->histograms(model.parameters());
      part.next("update");
      const optim::StepResult result = precision.step();
      part.next("data");
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      const double loss = world.sum(own, "loss") / world.size;
      if (run != nullptr) {
        tell(*run, result, loss, precision.loss_scale(), tokens / spent.count(),
             machine_share->take());
      }
      say(world, core::str("step ", step, "/", flags.steps, ": loss ", rounded(loss, 4), ", ",
                           rounded(spent.count(), 2), " s, ",
                           core::default_device().is_cuda() ? "GPU " : "process ",
                           support::human_bytes(most_memory()),
                           result.applied ? "" : "; skipped: ", result.reason));
      if (++step > flags.steps) break;
    }
  }
  if (run == nullptr) return;
  for (const std::string& sentence : observe::advice(*run)) say(world, sentence);
}

void export_model(gpt2::Gpt2& model, const Flags& flags, const World& world) {
  if (flags.export_to.empty()) return;
  gpt2::save(model, flags.export_to, world);
  const std::string tokenizer = gpt2::tokenizer_file(flags.model);
  const bool elsewhere = !std::filesystem::equivalent(flags.model, flags.export_to);
  if (world.rank == 0 && elsewhere && std::filesystem::exists(tokenizer))
    std::filesystem::copy_file(tokenizer, gpt2::tokenizer_file(flags.export_to),
                               std::filesystem::copy_options::overwrite_existing);
  say(world, "wrote " + flags.export_to);
}

/// Bytes a second that each process sends in an all_reduce of so many. What the group keeps for it
/// is there when memory is planned.
double measured_bandwidth(const parallel::ProcessGroup& group, std::int64_t bytes) {
  constexpr int kRuns = 3;
  if (group.world_size() == 1) return 0.0;
  const Tensor x = Tensor::zeros({bytes / 4});
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    group.barrier();
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(x, parallel::ReduceOp::sum, "bandwidth");
    group.wait();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    least = std::min(least, spent.count());
  }
  const double ranks = group.world_size();
  return 2.0 * static_cast<double>(x.nbytes()) * (ranks - 1.0) / ranks /
         group.all_reduce_max(least);
}

/// 0: hosts have different numbers of them.
int ranks_per_host(const parallel::ProcessGroup& group) {
  const double most = group.all_reduce_max(group.local_world_size());
  const double least = -group.all_reduce_max(-group.local_world_size());
  const bool even = most == least && group.world_size() % group.local_world_size() == 0;
  return even ? group.local_world_size() : 0;
}

checkpointing::Precision precision_of(const std::string& level, const std::string& half_dtype) {
  CAIRN_CHECK(level != "O3", "gpt2", "expected --opt-level O0, O1 or O2 with --plan, got O3");
  const DType half = level == "O0" ? DType::f32 : core::parse_dtype(half_dtype);
  return {level + (level == "O0" ? "" : " " + half_dtype), half, level == "O1", level == "O2"};
}

/// Whole, in f32.
std::shared_ptr<gpt2::Gpt2> model_to_plan(const Flags& flags) {
  try {
    return std::make_shared<gpt2::Gpt2>(gpt2::read_config(flags.model));
  } catch (const core::OutOfMemory& error) {
    throw core::OutOfMemory(core::str(
        error.what(), "; --plan measures a whole model in f32, which ", "--shard 3 never makes"));
  }
}

/// Of a model with the same sizes, on a batch of nothing.
checkpointing::TrainingChoice planned(const Flags& flags, const parallel::ProcessGroup& group) {
  constexpr std::int64_t kMessage = std::int64_t{8} << 20;
  const auto model = model_to_plan(flags);
  checkpointing::TrainingPlanOptions options;
  options.precisions = {precision_of(flags.common.opt_level, flags.common.half_dtype)};
  options.compact_state = !flags.full_state && flags.common.half_dtype == "bf16";
  options.tensors_only = true;  // as memory is capped
  const bool whole = !flags.logits.empty();
  if (!whole) options.shardings = checkpointing::shardings();
  if (flags.offload != kHost) options.states_folder = flags.offload;
  options.states_on_host = core::default_device().is_cuda();
  const double measured = measured_bandwidth(group, std::min(kMessage, 2 * count_of(*model)));
  const double bandwidth = flags.bandwidth > 0 ? static_cast<double>(flags.bandwidth) : measured;
  const Tensor tokens = Tensor::zeros({flags.batch_size, flags.tokens}, DType::i64);
  const checkpointing::TrainingPlan plan = checkpointing::plan_training(
      *model->chain(), {tokens, tokens}, core::memory_capacity(core::default_device()),
      {.ranks = group.world_size(),
       .bandwidth = bandwidth,
       .ranks_per_host = ranks_per_host(group)},
      options);
  say(group.world(), plan.table());
  try {
    return plan.best(group.world());
  } catch (const core::OutOfMemory& error) {
    const std::size_t program = flags.budget - core::memory_capacity(core::default_device());
    throw core::OutOfMemory(core::str(error.what(), "; beside that the program takes ",
                                      support::human_bytes(program), ": --budget ",
                                      support::human_bytes(program + plan.least().peak_bytes)));
  }
}

/// What the command line would say.
Flags as_planned(Flags flags, const checkpointing::TrainingChoice& choice) {
  flags.common.shard = static_cast<int>(choice.sharding);
  flags.common.shard_within = choice.shard_within;
  flags.micro_batches = static_cast<int>(choice.micro_batches);
  flags.recompute = choice.recomputes;
  flags.full_state = !choice.compact_state;
  if (!choice.states_in_files) flags.offload = choice.states_on_host ? kHost : "";
  return flags;
}

using Plan = std::optional<checkpointing::TrainingChoice>;

/// By the plan, if there is one. Else, alone, in the first way that fits; of several processes each
/// takes the way that it is given: one that ran out of memory in a trial would leave the others
/// waiting.
void train(const std::shared_ptr<gpt2::Gpt2>& gpt2, const data::TextDataset& text,
           const Flags& flags, const Plan& plan, const parallel::ProcessGroup& group) {
  gpt2::NextTokenLoss model(gpt2);
  model.plan = plan;
  const bool alone = group.world_size() == 1 && flags.common.shard == 0;
  std::vector<std::string> units;
  for (const std::string& layer : gpt2->layers()) units.push_back("gpt2." + layer);
  const auto ddp = alone ? nullptr : flags.common.data_parallel(model, group, units);
  const World world = alone ? World{} : ddp->world();
  optim::FusedAdam optimizer(model.parameters(), {.lr = flags.lr, .weight_decay = 0.01});
  optim::StateOptions states;
  states.on_host = flags.offload == kHost;  // which has them in f32
  if (!states.on_host) states.folder = flags.offload;
  if (!flags.full_state && !states.on_host && flags.common.half_dtype == "bf16") {
    states.moments = DType::bf16;
    states.masters = optim::MasterStorage::remainder;
  }
  optimizer.set_state_options(states);
  amp::Amp precision = amp::initialize(model, optimizer, flags.common.amp_options(world));
  const Way way = alone && !plan ? fitting_way(model, precision, optimizer, flags)
                                 : Way{flags.recompute, std::max(1, flags.micro_batches)};
  model.recompute = way.recompute;
  const bool sums_whole =
      plan && way.parts > 1 && plan->sharding < checkpointing::Sharding::gradients;
  if (sums_whole) optim::GradientArena::attach(model.parameters(), true);
  const std::string ranks =
      alone ? "" : "; " + flags.common.describe(world, core::default_device(), 0);
  say(world, core::str("within ", support::human_bytes(flags.budget), ": ",
                       plan ? plan->describe() : way.text(), ranks));
  if (alone) return take_steps(model, model, precision, text, way, flags, world);
  take_steps(*ddp, model, precision, text, way, flags, world);
  if (flags.common.shard > 0) export_model(*gpt2, flags, world);  // while ranks know their parts
}

void train_within_budget(const std::shared_ptr<gpt2::Gpt2>& model, const data::TextDataset& text,
                         const Flags& flags, const Plan& plan,
                         const parallel::ProcessGroup& group) {
  try {
    train(model, text, flags, plan, group);
  } catch (const core::OutOfMemory& error) {
    std::string advice;
    if (flags.full_state) advice += "; no --full-state, which takes 8 bytes a parameter more";
    if (group.world_size() > 1 && flags.common.shard < 3)
      advice += core::str("; --shard ", flags.common.shard + 1, ", which divides more");
    if (group.world_size() > 1 && !flags.recompute) advice += "; --recompute";
    throw core::OutOfMemory(error.what() + advice + "; fewer --tokens or a smaller --batch-size");
  }
}

void write_logits(gpt2::Gpt2& model, const data::TextDataset& text, const Flags& flags) {
  const autograd::NoGradGuard no_grad;
  const Tensor window = Tensor::zeros({1, flags.tokens}, DType::i64, Device{});
  const Tensor label = Tensor::zeros({1, flags.tokens}, DType::i64, Device{});
  text.read(0, window.view().select(0, 0), label.view().select(0, 0));
  const Tensor tokens = to_tokens(window, text.vocabulary());
  checkpointing::write_safetensors(flags.logits, {{"tokens", tokens}, {"logits", model(tokens)}});
  std::printf("wrote %s\n", flags.logits.c_str());
}

void check(const Flags& flags, const parallel::ProcessGroup& group) {
  CAIRN_CHECK(!flags.model.empty() && !flags.text.empty(), "gpt2",
              "expected --model and --text (or --write-random), got one or none");
  const bool parts = flags.common.shard > 0 && group.world_size() > 1;
  CAIRN_CHECK(!parts || flags.logits.empty(), "gpt2",
              "expected --logits without --shard, which leaves each process a part of the exact "
              "weights, got both");
  const bool chosen = flags.common.shard > 0 || flags.common.shard_within > 0 ||
                      flags.micro_batches > 0 || flags.recompute;
  CAIRN_CHECK(!flags.plan || !chosen, "gpt2", "expected --plan, which chooses, without --shard, ",
              "--shard-within, --micro-batches and --recompute, got some of them");
}

/// By the model's tokenizer.json, where there is one.
data::TextDataset read_text(const Flags& flags, std::int64_t words, const World& world) {
  data::TextOptions options{.window = flags.tokens};
  const std::string tokenizer = gpt2::tokenizer_file(flags.model);
  const bool has_tokenizer = std::filesystem::exists(tokenizer);
  if (has_tokenizer) options.unit = data::TextUnit::byte_pairs, options.tokenizer = tokenizer;
  data::TextDataset text = data::TextDataset::from_files(flags.text, options);
  const std::int64_t known = text.vocabulary().size();
  CAIRN_CHECK(known <= words, "gpt2", "expected at most the model's ", words, " tokens, got ",
              known, " in ", tokenizer);
  say(world, core::str("text: ", text.tokens().size(), " tokens",
                       has_tokenizer ? "" : ", a byte each: there is no ",
                       has_tokenizer ? "" : tokenizer));
  return text;
}

int run(Flags flags, const parallel::ProcessGroup& group) {
  if (!flags.write_random.empty()) {
    gpt2::write_random(flags.config, flags.write_random, flags.seed);
    std::printf("wrote %s\n", flags.write_random.c_str());
    return 0;
  }
  check(flags, group);
  const core::DefaultDeviceGuard device(group.device(flags.common.device));
  cap_memory(flags.budget);
  Plan plan;
  if (flags.plan) {
    plan = planned(flags, group);
    flags = as_planned(flags, *plan);
  }
  const auto model = [&] {
    const nn::DeferredInit deferred;  // the file has all weights, and is read as they are used
    return std::make_shared<gpt2::Gpt2>(gpt2::read_config(flags.model));
  }();
  gpt2::load(*model, flags.model);
  const World world = group.world();
  say(world, core::str(flags.model, ": ", rounded(static_cast<double>(count_of(*model)) / 1e6, 1),
                       " million parameters"));
  const data::TextDataset text = read_text(flags, model->config().words, world);
  if (flags.steps > 0) {
    train_within_budget(model, text, flags, plan, group);
    model->clear_grad();
    if (flags.common.shard == 0) amp::release(*model);  // f32 again, in the place of moments
  }
  if (flags.steps == 0 || flags.common.shard == 0) export_model(*model, flags, world);
  if (!flags.logits.empty() && world.rank == 0) write_logits(*model, text, flags);
  const auto most =
      static_cast<std::size_t>(group.all_reduce_max(static_cast<double>(most_memory())));
  say(world,
      core::str(world.size == 1 ? "the process" : "the largest process", " took ",
                support::human_bytes(most), core::default_device().is_cuda() ? " of its GPU" : "",
                " at most, of ", support::human_bytes(flags.budget)));
  return most <= flags.budget ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Fine-tunes GPT-2 from Hugging Face's files within a budget of memory", "gpt2");
  Flags flags;
  flags.add_to(app);
  return support::run_program(
      app, argc, argv, [&](const parallel::ProcessGroup& group) { return run(flags, group); });
}
