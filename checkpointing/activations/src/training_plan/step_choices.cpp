#include "training_plan/step_choices.h"

#include <utility>

#include "cairn/core/memory.h"
#include "cairn/nn/sequential.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kScaledLoss = 16;  // bytes: the loss times its scale and weight

// Of masters and moments.
struct Placement {
  bool in_files, on_host;
};
constexpr Placement kPlacements[] = {{false, false}, {true, false}, {false, true}};

std::size_t standing_of(const TrainingChoice& choice) {
  return choice.weights + choice.gradients + choice.optimizer_state + choice.other;
}

}  // namespace

StepChoices::StepChoices(nn::Sequential& model, const TrainingBatch& batch,
                         const PlanningBudget& room, const TrainingWorld& world,
                         const TrainingPlanOptions& options)
    : batch_(batch),
      room_(room),
      world_(world),
      options_(options),
      parts_{world.devices},
      bytes_(model, batch.x.device(), world),
      updates_(batch.x.device(), bytes_.trained_elements(), options.states_folder) {}

bool StepChoices::divides() const {
  const auto& all = options_.shardings;
  return world_.ranks > 1 &&
         std::any_of(all.begin(), all.end(), [](Sharding one) { return one != Sharding::none; });
}

std::vector<TrainingChoice> StepChoices::of(TrainingChoice like, const ScheduleChoice& schedules) {
  for (const bool compact : {false, true}) {
    const bool has_state = options_.moments > 0 || like.precision.half_weights;
    if (compact && (!options_.compact_state || !has_state)) continue;
    like.compact_state = compact;
    like.rounds_moments = compact && options_.moments > 0;
    add_divided(like, schedules);
  }
  return std::exchange(found_, {});
}

void StepChoices::add_divided(TrainingChoice choice, const ScheduleChoice& schedules) {
  const std::vector<Sharding> alone{Sharding::none};
  for (const Sharding sharding : world_.ranks > 1 ? options_.shardings : alone) {
    choice.sharding = sharding;
    choice.shard_within = 0;
    add_placed(choice, schedules);
    if (!divides_within_hosts(sharding)) continue;
    choice.shard_within = world_.ranks_per_host;
    add_placed(choice, schedules);
  }
}

/// On GPUs gathers of stage 3 would run beside reductions of another group.
bool StepChoices::divides_within_hosts(Sharding sharding) const {
  const int host = world_.ranks_per_host;
  const bool beside = sharding == Sharding::parameters && batch_.x.device().is_cuda();
  return sharding != Sharding::none && host > 1 && host < world_.ranks && !beside;
}

void StepChoices::add_placed(TrainingChoice choice, const ScheduleChoice& schedules) {
  for (const auto [in_files, on_host] : kPlacements) {
    if (in_files && options_.states_folder.empty()) continue;
    if (on_host && (!options_.states_on_host || choice.compact_state)) continue;
    choice.states_in_files = in_files;
    choice.states_on_host = on_host;
    const StepKind kind{.precision = choice.precision,
                        .compact = choice.compact_state,
                        .moments = options_.moments,
                        .accumulates = choice.micro_batches > 1,
                        .sharding = choice.sharding,
                        .shard_within = choice.shard_within,
                        .in_files = in_files,
                        .on_host = on_host};
    const StepBytes bytes = bytes_.of(kind);
    if (in_files && bytes.in_files == 0) continue;  // nothing is large enough for a file
    if (on_host && bytes.on_host == 0) continue;    // there are no states
    add(choice, kind, bytes, schedules.with(bytes.beside));
  }
}

void StepChoices::add(TrainingChoice choice, const StepKind& kind, const StepBytes& bytes,
                      const ScheduleChoice& schedules) {
  choice.weights = bytes.weights;
  choice.gradients = bytes.gradients;
  choice.optimizer_state = bytes.optimizer_state;
  choice.in_files = bytes.in_files;
  choice.on_host = bytes.on_host;
  choice.update_seconds = update_seconds(kind, bytes);
  choice.exchange_seconds = exchange_seconds(kind, bytes, choice.micro_batches);
  const TrainingChoice smallest = with_schedule(choice, bytes, schedules.smallest());
  if (!least_ || smallest.peak_bytes < least_->peak_bytes) least_ = smallest;
  found_.push_back(with_schedule(choice, bytes, schedules.plain()));
  if (found_.back().fits) return;
  const std::size_t beside = standing_of(choice) - bytes.counted_beside;
  const std::size_t room = less(room_.of_tensors(), beside + scaled_losses());
  const CostedSchedule* best =
      room < added_gradient(choice) ? nullptr : schedules.fastest(room, room + only_here(choice));
  found_.push_back(best == nullptr ? smallest : with_schedule(choice, bytes, *best));
}

// ---- Memory

TrainingChoice StepChoices::with_schedule(TrainingChoice choice, const StepBytes& bytes,
                                          const CostedSchedule& costed) const {
  choice.schedule = costed.schedule;
  for (const SchedulePart& part : choice.schedule) {
    choice.recomputes = choice.recomputes || !part.inner.empty() || part.results;
    choice.offloads = choice.offloads || part.offloaded;
  }
  const std::size_t elsewhere = less(costed.peak_elsewhere, only_here(choice));
  const std::size_t backward =
      std::max({costed.cost.peak, elsewhere, added_gradient(choice)}) + scaled_losses();
  choice.activations = std::max(less(backward, bytes.counted_beside), at_the_update(bytes));
  choice.peak_bytes = standing_of(choice) + choice.activations;
  const double times = static_cast<double>(samples()) / static_cast<double>(choice.micro_batch);
  choice.seconds = times * costed.cost.seconds + choice.update_seconds + choice.exchange_seconds;
  choice.fits = choice.peak_bytes <= room_.of_tensors();
  return choice;
}

// At the backward's end the other devices' gradients come one after the other, and are added.
std::size_t StepChoices::added_gradient(const TrainingChoice& choice) const {
  const bool one_part = parts_.first(choice.micro_batch) == choice.micro_batch;
  return one_part ? 0 : bytes_.largest_gradient(choice.precision);
}

std::size_t StepChoices::scaled_losses() const {
  return kScaledLoss * static_cast<std::size_t>(world_.devices);
}

// What other devices do not have before their backwards; the last has its part.
std::size_t StepChoices::only_here(const TrainingChoice& choice) const {
  const std::size_t batch = batch_.x.nbytes() + batch_.target.nbytes();
  const std::int64_t rest = samples() % choice.micro_batch;
  const auto most = static_cast<std::size_t>(
      std::max(parts_.last(choice.micro_batch), rest == 0 ? 0 : parts_.last(rest)));
  const std::size_t part = most * batch / static_cast<std::size_t>(samples());
  return choice.optimizer_state + choice.gradients + less(bytes_.other(), part);
}

// Weights that are handed round, and of a process also blocks of files, beside what stands.
std::size_t StepChoices::at_the_update(const StepBytes& bytes) const {
  return less(bytes.updating + (room_.of_process() ? bytes.in_window : 0), bytes.in_sums);
}

// ---- Time

double StepChoices::update_seconds(const StepKind& kind, const StepBytes& bytes) {
  const Device device = batch_.x.device();
  const std::size_t room =
      less(core::memory_capacity(device), core::memory_stats(device).current_total);
  const double told = options_.states_bandwidth;
  StepKind measured = kind;
  if (told > 0) measured.in_files = false;
  const ElementSeconds element = updates_.of(measured, room);
  const double in_and_out = told > 0 ? 2 * static_cast<double>(bytes.in_files) / told : 0;
  return element.check * static_cast<double>(bytes.checked) +
         element.update * static_cast<double>(bytes.updated) + in_and_out;
}

double StepChoices::exchange_seconds(const StepKind& kind, const StepBytes& bytes,
                                     std::int64_t backwards) const {
  if (world_.ranks == 1 || world_.bandwidth <= 0) return 0;
  const SentBytes sent = sent_bytes(bytes, kind, backwards, world_);
  const double host = world_.host_bandwidth > 0 ? world_.host_bandwidth : world_.bandwidth;
  return sent.in_host / host + sent.across / world_.bandwidth;
}

}  // namespace cairn::checkpointing
