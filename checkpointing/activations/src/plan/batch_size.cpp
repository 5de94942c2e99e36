#include "cairn/checkpointing/batch_size.h"

#include <algorithm>
#include <limits>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

class CapacityGuard {
 public:
  CapacityGuard(Device device, std::size_t bytes)
      : device_(device), before_(core::memory_capacity(device)) {
    core::set_memory_capacity(device, std::min(before_, bytes));
  }
  ~CapacityGuard() { core::set_memory_capacity(device_, before_); }
  CapacityGuard(const CapacityGuard&) = delete;
  CapacityGuard& operator=(const CapacityGuard&) = delete;

 private:
  Device device_;
  std::size_t before_;
};

}  // namespace

BatchSize largest_batch(const std::function<void(std::int64_t batch)>& step,
                        const BatchSizeOptions& options) {
  const std::size_t budget = options.budget == 0 ? kUnlimited : options.budget;
  const CapacityGuard guard(options.device, budget);
  CAIRN_CHECK(core::memory_capacity(options.device) != kUnlimited, "largest_batch",
              "expected a budget in bytes, or a capacity of ", options.device, ", got none");
  CAIRN_CHECK(options.most >= 1, "largest_batch", "expected a most of 1 or more, got ",
              options.most);
  BatchSize found;
  const auto fits = [&](std::int64_t batch) {
    core::reset_peak_memory(options.device);
    try {
      step(batch);
    } catch (const core::OutOfMemory&) {
      if (batch == 1) throw;
      return false;
    }
    found = {batch, core::memory_stats(options.device).peak_total};
    return true;
  };
  (void)fits(1);  // makes what stays
  std::int64_t beyond = 1;
  while (beyond <= options.most && fits(beyond)) beyond *= 2;
  beyond = std::min(beyond, options.most + 1);
  while (beyond - found.batch > 1) {
    const std::int64_t between = found.batch + (beyond - found.batch) / 2;
    if (!fits(between)) beyond = between;
  }
  return found;
}

}  // namespace cairn::checkpointing
