// What the allocator tells people: the table by category, the largest tensors, and the OutOfMemory
// message.
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "allocator.h"
#include "cairn/core/error.h"

namespace cairn::core {

namespace {

constexpr std::size_t kShown = 5;  // largest tensors in a report

const char* remedy(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::parameters:
      return "half-precision parameters (opt level O2 or O3), where they are not yet";
    case MemoryCategory::gradients:
      return "half-precision gradients (opt level O2), where they are not yet";
    case MemoryCategory::optimizer_state:
      return "states of 2 bytes (Optimizer::set_state_options), an optimizer with fewer (SGD), or "
             "states sharded over the ranks (parallel::ShardedDataParallel)";
    case MemoryCategory::activations:
      return "a smaller batch with gradient accumulation, half precision (opt level O1 or O2), "
             "where it is not on yet, or recomputed activations (checkpointing::checkpoint)";
    case MemoryCategory::workspace:
      return "a smaller batch, which needs less scratch memory";
    case MemoryCategory::communication:
      return "smaller gradient buckets";
    case MemoryCategory::other:
      return "a smaller batch, or dropping tensors that are still held";
  }
  return "a smaller batch";
}

MemoryCategory largest_category(const MemoryStats& stats) {
  const auto largest = std::max_element(stats.current.begin(), stats.current.end());
  return static_cast<MemoryCategory>(largest - stats.current.begin());
}

}  // namespace

std::string readable_bytes(std::size_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  std::ostringstream out;
  out << std::fixed << std::setprecision(value < 10 ? 2 : 1) << value << ' ' << kUnits[unit];
  return out.str();
}

std::string Allocator::table() const {
  std::ostringstream out;
  out << device_ << (pinned_ ? " pinned" : "") << ": " << readable_bytes(stats_.current_total)
      << " live, " << readable_bytes(stats_.peak_total) << " at peak, "
      << readable_bytes(stats_.reserved) << " reserved, capacity "
      << (capacity_ == SIZE_MAX ? "unlimited" : readable_bytes(capacity_)) << '\n';
  for (int i = 0; i < kMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    if (stats_.peak_of(category) == 0) continue;
    out << "  " << std::left << std::setw(16) << name(category) << std::right << std::setw(12)
        << readable_bytes(stats_.of(category)) << " live " << std::setw(12)
        << readable_bytes(stats_.peak_of(category)) << " at peak\n";
  }
  return out.str();
}

std::string Allocator::largest_tensors() const {
  std::vector<const Storage*> storages;
  for (const Storage* s = live_; s != nullptr; s = s->next_) storages.push_back(s);
  const std::size_t shown = std::min(kShown, storages.size());
  if (shown == 0) return "";
  std::partial_sort(storages.begin(), storages.begin() + static_cast<std::ptrdiff_t>(shown),
                    storages.end(),
                    [](const Storage* a, const Storage* b) { return a->bytes_ > b->bytes_; });
  std::ostringstream out;
  out << "  largest of " << storages.size() << " live blocks: ";
  for (std::size_t i = 0; i < shown; ++i) {
    out << (i > 0 ? ", " : "") << readable_bytes(storages[i]->bytes_) << ' '
        << name(storages[i]->category_);
  }
  out << '\n';
  return out.str();
}

void Allocator::fail_out_of_memory(std::size_t bytes, MemoryCategory category) const {
  note(MemoryEvent::Action::out_of_memory, {nullptr, bytes}, nullptr, category);
  const bool capped = over_capacity(bytes);
  std::ostringstream out;
  if (capped) {
    const std::size_t left = capacity_ - std::min(capacity_, stats_.current_total);
    out << "expected at most " << readable_bytes(left) << " (what the capacity leaves)";
  } else {
    out << "expected a size that the system can give";
  }
  out << ", got a request for " << readable_bytes(bytes) << " (" << bytes << " bytes, "
      << name(category) << ") on " << device_ << '\n'
      << table() << largest_tensors();
  out << "  what would help: "
      << remedy(stats_.current_total == 0 ? category : largest_category(stats_));
  if (capped) out << "; or a larger capacity (CAIRN_DEVICE_MEMORY, core::set_memory_capacity)";
  fail<OutOfMemory>("allocate", out.str());
}

}  // namespace cairn::core
