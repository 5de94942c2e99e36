#include "cairn/checkpointing/training_plan.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/passing_lists.h"
#include "cairn/nn/linear.h"
#include "cairn/nn/sequential.h"
#include "plan/block_meter.h"
#include "plan/planning_budget.h"
#include "plan/schedule_choice.h"
#include "training_plan/fused_end.h"
#include "training_plan/paired_times.h"
#include "training_plan/step_choices.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kPlannedSlots = 500;  // of memory, in the programme
constexpr std::size_t kTimedAgain = 4;      // chains, and only those within a factor
constexpr double kWithinNoise = 4;

using LossFunction = std::function<Tensor(const Tensor&, const Tensor&)>;

Tensor micro_batch_of(const Tensor& x, int dimension, std::int64_t size) {
  return x.alias(x.view().slice(dimension, 0, std::min(size, x.size(dimension))));
}

bool trains_batch_norms(nn::Module& model) {
  const auto modules = model.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& named) {
    return named.second->is_batch_norm() && named.second->training();
  });
}

// ---- Measured chains

// What decides a chain's profile, beside its precision.
struct ChainKind {
  bool fused = false, balanced = true;
};

// A chain whose choices have been added, to be timed again.
struct TimedChain {
  Precision precision;
  ChainKind kind;
  std::int64_t size = 0;
  double seconds = 0;  // as it was measured, kept whole
};

// What a choice's time is made of.
struct TimedChoice {
  std::size_t chain = 0;
  double steps = 0, fixed = 0;  // seconds: of its micro-batches, of the update
};

// A backward of a step, as a device sees it.
struct Pass {
  std::int64_t samples = 0;                   // of the device
  std::int64_t with_loss = 0;                 // of which it takes the loss; more are gathered
  bool one_of_several = false, adds = false;  // and to the gradients of an earlier one
  bool elsewhere = false;  // on the last of several devices, which makes gradients of its own
};

struct MeasuredChain {
  std::vector<ChainProfile> profiles;  // of the first device: of a whole micro-batch, and the rest
  std::vector<ChainProfile> elsewhere;
  std::size_t input = 0;  // bytes of the model's half input beside the batch
};

// The ways that both were measured with, under the first one's names.
void keep_common_ways(BlockProfile& block, BlockProfile& other) {
  std::erase_if(block.selective, [&](const SelectiveBlock& way) {
    for (SelectiveBlock& same : other.selective) {
      if (*same.results != *way.results) continue;
      same.results = way.results;
      return false;
    }
    return true;
  });
  if (!other.offloaded) block.offloaded.reset();
}

/// Says how far planning is, now and then.
class Progress {
 public:
  explicit Progress(std::size_t all) : all_(all) {}
  void next(const Precision& precision, std::int64_t size) {
    const auto now = std::chrono::steady_clock::now();
    if (now - told_ >= kInterval) {
      told_ = now;
      log::info("plan_training: {} of {} measured, next {} in micro-batches of {}", done_, all_,
                precision.name, size);
    }
    ++done_;
  }

 private:
  static constexpr std::chrono::seconds kInterval{5};
  std::size_t all_, done_ = 0;
  std::chrono::steady_clock::time_point told_ = std::chrono::steady_clock::now();
};

class TrainingPlanner {
 public:
  TrainingPlanner(nn::Sequential& model, const TrainingBatch& batch, std::size_t budget,
                  const TrainingWorld& world, const TrainingPlanOptions& options)
      : model_(model),
        batch_(batch),
        world_(world),
        options_(options),
        device_(batch.x.device()),
        room_(device_, budget, !options.tensors_only && world.devices == 1),
        loss_(options.loss
                  ? options.loss
                  : [](const Tensor& y, const Tensor& t) { return autograd::cross_entropy(y, t); }),
        offload_(planned_offload(options.offload)),
        steps_(model, batch_, room_, world, options),
        parts_{world.devices},
        trains_batch_norms_(trains_batch_norms(model)),
        sizes_(micro_batches()) {}

  TrainingPlan plan(std::size_t budget) {
    const std::vector<ChainKind> all = kinds();
    Progress progress(options_.precisions.size() * all.size() * sizes_.size());
    for (const Precision& precision : options_.precisions) {
      for (const ChainKind& kind : all) add_choices(precision, kind, progress);
    }
    if (choices_.empty()) add_beyond_the_budget(all);
    time_fastest_again();
    room_.give_back();
    for (TrainingChoice& choice : choices_) settle(choice);
    std::optional<TrainingChoice> least = steps_.least();
    if (!least) return {std::move(choices_), budget};
    settle(*least);
    return {std::move(choices_), budget, std::move(*least)};
  }

 private:
  // Libraries have taken what they take.
  void settle(TrainingChoice& choice) const {
    choice.beside = room_.beside();
    choice.fits = choice.fits && choice.peak_bytes <= room_.of_tensors();
  }

  std::vector<ChainKind> kinds() {
    std::vector<ChainKind> all{{.fused = false, .balanced = true}};
    if (world_.devices > 1) all.push_back({.fused = false, .balanced = false});
    if (options_.fused_loss && !options_.loss && fusable_end(model_))
      all.push_back({.fused = true, .balanced = true});
    return all;
  }

  std::int64_t samples() const { return batch_.x.size(batch_.dimension); }

  std::vector<std::int64_t> micro_batches() const {
    std::vector<std::int64_t> sizes = options_.micro_batches;
    const bool whole = trains_batch_norms_ && !options_.split_batch_norms;
    const bool halves = options_.micro_batches.empty() && !whole;
    for (std::int64_t n = samples(); sizes.empty() || (halves && n > 1);) {
      if (!sizes.empty()) n = (n + 1) / 2;
      sizes.push_back(n);
    }
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    return sizes;
  }

  void add_choices(const Precision& precision, const ChainKind& kind, Progress& progress) {
    bool runs = true;  // smaller sizes did
    for (const std::int64_t size : sizes_) {
      progress.next(precision, size);
      runs = runs && add_choices(precision, kind, size);
    }
  }

  // false: it does not run in the memory that there is.
  bool add_choices(const Precision& precision, const ChainKind& kind, std::int64_t size) {
    MeasuredChain chain;
    try {
      chain = measure_all(precision, kind, size);
    } catch (const core::OutOfMemory&) {
      return false;
    }
    add_choices(precision, kind, size, chain);
    return true;
  }

  // Where nothing runs in the budget: what the smallest size takes in all that the device has, for
  // the error that says which budget would do; of what only ranks together can hold, every size.
  void add_beyond_the_budget(const std::vector<ChainKind>& kinds) {
    room_.lift();
    if (!steps_.divides()) sizes_.resize(1);
    Progress progress(options_.precisions.size() * kinds.size() * sizes_.size());
    for (const Precision& precision : options_.precisions) {
      for (const ChainKind& kind : kinds) add_choices(precision, kind, progress);
    }
  }

  // Of a module kept whole, one after another.
  static double plain_seconds(const MeasuredChain& chain) {
    double seconds = 0;
    for (const BlockProfile& block : chain.profiles.front()) {
      seconds += block.forward_seconds + block.backward_seconds;
    }
    return seconds;
  }

  // The fastest choice of each chain that fits, where noise could have put it behind another's.
  std::vector<std::size_t> fastest_of_chains() const {
    std::vector<std::size_t> order, best;
    for (std::size_t i = 0; i < choices_.size(); ++i) {
      if (choices_[i].fits) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](auto a, auto b) { return choices_[a].seconds < choices_[b].seconds; });
    for (const std::size_t i : order) {
      const bool near = choices_[i].seconds <= kWithinNoise * choices_[order[0]].seconds;
      const bool known = std::any_of(best.begin(), best.end(), [&](std::size_t other) {
        return timed_[other].chain == timed_[i].chain;
      });
      if (near && !known && best.size() < kTimedAgain) best.push_back(i);
    }
    return best;
  }

  // What else the machine did while the one or the other was measured must not choose: the fastest
  // are timed by turns until they differ for sure.
  void time_fastest_again() {
    const std::vector<std::size_t> best = fastest_of_chains();
    if (best.size() < 2) return;
    std::vector<std::function<double()>> works;
    works.reserve(best.size());
    for (const std::size_t i : best) {
      works.emplace_back([this, &timed = timed_[i]] {
        const TimedChain& chain = timed_chains_[timed.chain];
        const double now =
            plain_seconds(measure(chain.precision, passes_of(chain.kind, chain.size).front(),
                                  chain.kind.fused, /*times_only=*/true));
        return timed.steps * now / chain.seconds + timed.fixed;
      });
    }
    const std::vector<double> seconds = paired_times(works);
    std::vector<double> ratios(timed_chains_.size(), 0);  // 0: not timed again
    for (std::size_t k = 0; k < best.size(); ++k) {
      const TimedChoice& timed = timed_[best[k]];
      ratios[timed.chain] = (seconds[k] - timed.fixed) / timed.steps;
    }
    const double fastest = *std::min_element(seconds.begin(), seconds.end());
    for (std::size_t i = 0; i < choices_.size(); ++i) {
      const double ratio = ratios[timed_[i].chain];
      choices_[i].seconds = ratio > 0 ? ratio * timed_[i].steps + timed_[i].fixed
                                      : std::max(choices_[i].seconds, fastest);
    }
  }

  // Fewer samples may take more scratch: the first device's part of a whole micro-batch comes with
  // each other part that a step has, of the last device and of what the last micro-batch is left.
  std::vector<Pass> passes_of(const ChainKind& kind, std::int64_t size) const {
    std::vector<Pass> all;
    const auto add = [&](std::int64_t micro_batch, bool adds) {
      const std::int64_t part = parts_.first(micro_batch), last = parts_.last(micro_batch);
      all.push_back({part, kind.balanced ? part : micro_batch, size < samples(), adds});
      if (last != part) all.push_back({.samples = last, .with_loss = last, .elsewhere = true});
    };
    add(size, samples() >= 2 * size);
    if (samples() % size != 0) add(samples() % size, true);
    return all;
  }

  MeasuredChain measure_all(const Precision& precision, const ChainKind& kind, std::int64_t size) {
    const std::vector<Pass> passes = passes_of(kind, size);
    MeasuredChain chain = measure(precision, passes.front(), kind.fused);
    for (std::size_t k = 1; k < passes.size(); ++k) {
      ChainProfile other = measure(precision, passes[k], kind.fused).profiles.front();
      for (std::size_t i = 0; i < other.size(); ++i) {
        keep_common_ways(chain.profiles.front()[i], other[i]);
      }
      (passes[k].elsewhere ? chain.elsewhere : chain.profiles).push_back(std::move(other));
    }
    return chain;
  }

  MeasuredChain measure(const Precision& precision, const Pass& pass, bool fused,
                        bool times_only = false) {
    meter_ = {.repeats = options_.repeats,
              .placed = !pass.elsewhere,
              .sums = pass.one_of_several,
              .accumulates = pass.adds,
              .times_only = times_only};
    const Tensor target = micro_batch_of(batch_.target, batch_.dimension, pass.with_loss);
    MeasuredChain chain{.profiles = {{}}};
    Tensor x = micro_batch_of(batch_.x, batch_.dimension, pass.samples).detach();
    if (precision.half_weights && core::is_floating(x.dtype())) {
      x = autograd::to(x, precision.half);
      chain.input = x.nbytes();
    }
    ChainProfile& profile = chain.profiles.front();
    MeasuredBlock last{{}, x, false};
    KnownBlocks known;
    for (std::size_t i = 0; i < model_.size(); ++i) {
      room_.refresh();
      const Tensor own_target = i + 1 == model_.size() ? target : Tensor();
      last = measure_module(precision, fused, model_.at(i), last, own_target, pass.samples, known);
      profile.push_back(last.profile);
    }
    CAIRN_CHECK(last.result_wants_gradient, kTrainingPlanner,
                "expected a model whose loss depends on a parameter, got one without a graph");
    // The loss's backward follows at once, and writes over results that nobody keeps.
    profile.back().selective.clear();
    // They stand before the step.
    for (BlockProfile& block : profile) {
      if (!pass.elsewhere) block.parameter_gradients = 0;
    }
    return chain;
  }

  // The last one with the loss, whose backward writes over outputs that nobody else holds; and
  // where outputs are gathered, with those of other devices.
  MeasuredBlock measure_module(const Precision& precision, bool fused, nn::Module& original,
                               const MeasuredBlock& before, const Tensor& target,
                               std::int64_t samples, KnownBlocks& known) {
    std::shared_ptr<nn::Module> half;
    if (precision.half_weights) half = half_clone(original, precision.half);
    nn::Module& module = half ? *half : original;
    Segment forward = [&module](const Tensor& x) { return module(x); };
    if (fused && target.defined()) {
      forward = fused_end(dynamic_cast<nn::Linear&>(module), target);
    }
    Segment block = forward;
    std::size_t before_loss = 0;
    std::optional<autograd::AutocastGuard> region;
    if (target.defined()) {
      block = [&](const Tensor& x) {
        Tensor y = in_region(precision, forward, x);
        if (fused) return y;
        core::Stream::current(device_).synchronize();
        if (y.storage() != x.storage()) before_loss = core::memory_stats(device_).peak_total;
        if (precision.half_weights && core::is_half(y.dtype())) y = autograd::to(y, DType::f32);
        y = gathered(std::move(y), samples, target);
        return loss_(y, target);
      };
    } else if (precision.autocast) {
      region.emplace(true, precision.half);
    }
    MeterOptions meter = meter_;
    if (target.defined()) {
      if (!fused) meter.before_loss = &before_loss;
    } else {
      meter.offload = offload_.get();
      meter.known = &known;
      meter.chain = model_.size();
    }
    return measure_block(kTrainingPlanner, block, before.result, before.result_wants_gradient,
                         meter);
  }

  static Tensor in_region(const Precision& precision, const Segment& forward, const Tensor& x) {
    std::optional<autograd::AutocastGuard> region;
    if (precision.autocast) region.emplace(true, precision.half);
    return forward(x);
  }

  // Beside this device's output those of the others, of which only copies lie here.
  Tensor gathered(Tensor y, std::int64_t part, const Tensor& target) const {
    const std::int64_t samples = target.size(batch_.dimension);
    std::vector<Tensor> parts{y};
    for (std::int64_t at = part; at < samples; at += part) {
      const std::int64_t rows = y.size(0) / part * std::min(part, samples - at);
      const TensorView own = y.view().slice(0, 0, rows);
      parts.push_back(Tensor::empty(own.shape, own.dtype, device_));
      kernels::copy(own, parts.back());
    }
    if (parts.size() > 1) y = autograd::concat(parts, 0);
    return y;
  }

  void add_choices(const Precision& precision, const ChainKind& kind, std::int64_t size,
                   const MeasuredChain& chain) {
    const ScheduleChoice schedules(chain.profiles, kPlannedSlots, chain.elsewhere);
    timed_chains_.push_back({precision, kind, size, plain_seconds(chain)});
    TrainingChoice choice;
    choice.precision = precision;
    choice.micro_batch = size;
    choice.dimension = batch_.dimension;
    choice.micro_batches = (samples() + size - 1) / size;
    choice.splits_batch_norms = trains_batch_norms_ && choice.micro_batches > 1;
    choice.fused_loss = kind.fused;
    choice.balanced_loss = kind.balanced;
    choice.other = steps_.other() + chain.input;
    choice.loss_function = loss_;
    choice.offload = offload_;
    for (TrainingChoice& one : steps_.of(std::move(choice), schedules)) {
      const double fixed = one.update_seconds + one.exchange_seconds;
      timed_.push_back({timed_chains_.size() - 1, one.seconds - fixed, fixed});
      choices_.push_back(std::move(one));
    }
  }

  nn::Sequential& model_;
  TrainingBatch batch_;
  TrainingWorld world_;
  TrainingPlanOptions options_;
  Device device_;
  PlanningBudget room_;
  LossFunction loss_;
  std::shared_ptr<Offload> offload_;
  StepChoices steps_;
  DeviceParts parts_;
  bool trains_batch_norms_;
  std::vector<std::int64_t> sizes_;
  std::vector<TrainingChoice> choices_;
  std::vector<TimedChain> timed_chains_;
  std::vector<TimedChoice> timed_;  // the choices', as many
  MeterOptions meter_;              // of the chain that is measured now
};

void check_division(Device device, const TrainingWorld& world, const TrainingPlanOptions& options) {
  const auto& all = options.shardings;
  const bool divides =
      std::any_of(all.begin(), all.end(), [](Sharding one) { return one != Sharding::none; });
  CAIRN_CHECK(!options.shardings.empty(), kTrainingPlanner,
              "expected shardings, got none (Sharding::none where ranks divide nothing)");
  CAIRN_CHECK(!divides || world.ranks == 1 || world.bandwidth > 0, kTrainingPlanner,
              "expected a bandwidth in bytes a second to compare shardings by, got ",
              world.bandwidth);
  CAIRN_CHECK(!divides || world.devices == 1, kTrainingPlanner,
              "expected one device a process where ranks divide a model, got ", world.devices);
  CAIRN_CHECK(world.ranks_per_host >= 0 && world.host_bandwidth >= 0 &&
                  (world.ranks_per_host == 0 || world.ranks % world.ranks_per_host == 0),
              kTrainingPlanner, "expected ranks_per_host to divide the number of ranks, ",
              world.ranks, ", and a host_bandwidth of bytes a second, or 0, got ",
              world.ranks_per_host, " and ", world.host_bandwidth);
  CAIRN_CHECK(world.bucket_bytes > 0 && world.first_bucket_bytes > 0, kTrainingPlanner,
              "expected buckets of some bytes, got ", world.first_bucket_bytes, " and ",
              world.bucket_bytes);
  CAIRN_CHECK(options.states_bandwidth >= 0, kTrainingPlanner,
              "expected a states_bandwidth of bytes a second, or 0, got ",
              options.states_bandwidth);
  CAIRN_CHECK(options.states_folder.empty() || device.is_cpu() || options.states_bandwidth > 0,
              kTrainingPlanner, "expected a states_bandwidth for states of ", device,
              " in files, got none (an update is timed on the CPU alone)");
  CAIRN_CHECK(!options.states_on_host || device.is_cuda(), kTrainingPlanner,
              "expected a model on a GPU for states_on_host, got one on ", device,
              ", whose states lie there (states_folder offers files)");
}

void check_arguments(nn::Sequential& model, const TrainingBatch& batch, const TrainingWorld& world,
                     const TrainingPlanOptions& options) {
  CAIRN_CHECK(model.size() > 0, kTrainingPlanner, "expected modules, got an empty Sequential");
  CAIRN_CHECK(batch.x.defined() && batch.target.defined() && batch.dimension >= 0 &&
                  batch.dimension < batch.x.dims() && batch.dimension < batch.target.dims() &&
                  batch.x.size(batch.dimension) > 0,
              kTrainingPlanner,
              "expected a batch of inputs and targets with samples along dimension ",
              batch.dimension, ", got none");
  CAIRN_CHECK(batch.x.size(batch.dimension) == batch.target.size(batch.dimension), kTrainingPlanner,
              "expected as many targets as inputs, got ", batch.target.size(batch.dimension),
              " and ", batch.x.size(batch.dimension));
  CAIRN_CHECK(world.ranks > 0 && world.devices > 0, kTrainingPlanner,
              "expected ranks and devices above 0, got ", world.ranks, " and ", world.devices);
  CAIRN_CHECK(!options.precisions.empty() && options.repeats > 0 && options.moments >= 0 &&
                  options.moments <= 2,
              kTrainingPlanner, "expected precisions, repeats above 0 and 0 to 2 moments, got ",
              options.precisions.size(), " precisions, ", options.repeats, " and ",
              options.moments);
  check_division(batch.x.device(), world, options);
  for (const std::int64_t size : options.micro_batches) {
    CAIRN_CHECK(size > 0 && size <= batch.x.size(batch.dimension), kTrainingPlanner,
                "expected micro-batches of 1 to ", batch.x.size(batch.dimension), " samples, got ",
                size);
  }
}

}  // namespace

std::vector<Sharding> shardings() {
  return {Sharding::none, Sharding::optimizer_states, Sharding::gradients, Sharding::parameters};
}

std::vector<Precision> precisions() {
  return {{"O0"},
          {"O1 bf16", DType::bf16, true, false},
          {"O1 f16", DType::f16, true, false},
          {"O2 bf16", DType::bf16, false, true},
          {"O2 f16", DType::f16, false, true}};
}

TrainingPlan plan_training(nn::Sequential& model, const TrainingBatch& batch, std::size_t budget,
                           const TrainingWorld& world, const TrainingPlanOptions& options) {
  check_arguments(model, batch, world, options);
  core::Stream::current(batch.x.device()).synchronize();
  const core::PassiveWaitGuard waits;  // the processors may be other programs', too
  const kernels::PassingLists lists;   // or the next plan finds a fuller device
  return TrainingPlanner(model, batch, budget, world, options).plan(budget);
}

}  // namespace cairn::checkpointing
