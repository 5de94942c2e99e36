// What a training step takes by each choice, of a chain that was measured.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cairn/checkpointing/training_plan.h"
#include "plan/planning_budget.h"
#include "plan/schedule_choice.h"
#include "training_plan/model_bytes.h"
#include "training_plan/update_meter.h"

namespace cairn::checkpointing {

inline std::size_t less(std::size_t bytes, std::size_t taken) {
  return bytes > taken ? bytes - taken : 0;
}

/// How devices of a process divide samples.
struct DeviceParts {
  int devices = 1;

  std::int64_t first(std::int64_t samples) const { return (samples + devices - 1) / devices; }
  std::int64_t last(std::int64_t samples) const { return (samples - 1) % first(samples) + 1; }
};

class StepChoices {
 public:
  /// `room` and `batch` live as long.
  StepChoices(nn::Sequential& model, const TrainingBatch& batch, const PlanningBudget& room,
              const TrainingWorld& world, const TrainingPlanOptions& options);

  /// Whether ranks divide anything in some of the choices.
  bool divides() const;
  /// What the device holds beside the model's weights, gradients and optimizer state.
  std::size_t other() const { return bytes_.other(); }

  /// By compact or f32 state, by what ranks divide, with states in memory, in files and on the
  /// host: the plain schedule, and where it does not fit the fastest that does, or the smallest.
  /// `like` has what they have in common.
  std::vector<TrainingChoice> of(TrainingChoice like, const ScheduleChoice& schedules);
  /// Of all so far, the one that takes least memory.
  const std::optional<TrainingChoice>& least() const { return least_; }

 private:
  void add_divided(TrainingChoice choice, const ScheduleChoice& schedules);
  bool divides_within_hosts(Sharding sharding) const;
  void add_placed(TrainingChoice choice, const ScheduleChoice& schedules);
  void add(TrainingChoice choice, const StepKind& kind, const StepBytes& bytes,
           const ScheduleChoice& schedules);
  TrainingChoice with_schedule(TrainingChoice choice, const StepBytes& bytes,
                               const CostedSchedule& costed) const;

  std::int64_t samples() const { return batch_.x.size(batch_.dimension); }
  std::size_t added_gradient(const TrainingChoice& choice) const;
  std::size_t scaled_losses() const;
  std::size_t only_here(const TrainingChoice& choice) const;
  std::size_t at_the_update(const StepBytes& bytes) const;
  double update_seconds(const StepKind& kind, const StepBytes& bytes);
  double exchange_seconds(const StepKind& kind, const StepBytes& bytes,
                          std::int64_t backwards) const;

  const TrainingBatch& batch_;
  const PlanningBudget& room_;
  TrainingWorld world_;
  TrainingPlanOptions options_;
  DeviceParts parts_;
  ModelBytes bytes_;
  UpdateMeter updates_;
  std::vector<TrainingChoice> found_;
  std::optional<TrainingChoice> least_;
};

}  // namespace cairn::checkpointing
