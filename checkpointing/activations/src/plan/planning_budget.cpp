#include "plan/planning_budget.h"

#include <algorithm>
#include <cstdint>

#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/core/stream.h"

namespace cairn::checkpointing {

PlanningBudget::PlanningBudget(Device device, std::size_t bytes, bool of_process)
    : device_(device),
      bytes_(bytes),
      before_(core::memory_capacity(device)),
      of_process_(of_process && device.is_cpu()) {
  core::Stream::current(device_).synchronize();
  core::release_cached_memory(device_);
  refresh();
}

PlanningBudget::~PlanningBudget() {
  core::set_memory_capacity(device_, before_);
}

void PlanningBudget::refresh() {
  if (of_process_) {
    const std::size_t process = core::process_memory("VmRSS"),
                      tensors = core::memory_stats(device_).reserved;
    beside_ = process > tensors ? process - tensors : 0;
  }
  if (!lifted_) core::set_memory_capacity(device_, std::min(before_, of_tensors()));
}

void PlanningBudget::lift() {
  lifted_ = true;
  const std::size_t left = device_.is_cpu() ? core::memory_left() : SIZE_MAX,
                    standing = core::memory_stats(device_).reserved;
  core::set_memory_capacity(
      device_, std::min(before_, left > SIZE_MAX - standing ? SIZE_MAX : left + standing));
}

void PlanningBudget::give_back() {
  core::release_cached_memory(device_);
  refresh();
  if (of_process_) core::set_cache_bound(device_, bytes_ == SIZE_MAX ? SIZE_MAX : of_tensors());
}

}  // namespace cairn::checkpointing
