// What a budget leaves to tensors, while a plan is made for it and afterwards.
#pragma once

#include <cstddef>

#include "cairn/core/device.h"

namespace cairn::checkpointing {

/// While one lives the device is capped, so that planning stays within the budget, too.
class PlanningBudget {
 public:
  /// `of_process`: of all that the process takes, not of live tensors alone.
  PlanningBudget(Device device, std::size_t bytes, bool of_process);
  ~PlanningBudget();
  PlanningBudget(const PlanningBudget&) = delete;
  PlanningBudget& operator=(const PlanningBudget&) = delete;

  /// Counts what the process takes beside tensors, which grows as code is used for the first time.
  void refresh();
  /// From now on capped at what the machine has left, and where the device was capped before.
  void lift();
  /// Gives back what measuring took and refreshes; of a process, bounds what the allocator will
  /// hold from now on to what the budget leaves to tensors.
  void give_back();

  bool of_process() const { return of_process_; }
  std::size_t beside() const { return beside_; }  // that the process takes beside tensors
  std::size_t of_tensors() const { return bytes_ > beside_ ? bytes_ - beside_ : 0; }

 private:
  Device device_;
  std::size_t bytes_, before_, beside_ = 0;
  bool of_process_, lifted_ = false;
};

}  // namespace cairn::checkpointing
