#include "store/ledger.h"

#include <utility>

#include "cairn/core/error.h"

namespace cairn::parallel {

std::optional<Ledger::Complete> Ledger::report(const Report& report, Clock::time_point now) {
  if (!failure_.empty()) return std::nullopt;
  auto [it, is_first] = open_.try_emplace(report.sequence);
  Entry& entry = it->second;
  if (is_first) {
    entry.description = report.description;
    entry.first_rank = report.rank;
    entry.values.resize(static_cast<std::size_t>(world_size_));
    entry.since = now;
    entry.timeout = report.timeout;
  }
  if (entry.description != report.description) {
    fail(core::str("ranks disagree on collective ", report.sequence, ": rank ", entry.first_rank,
                   " calls ", entry.description, ", rank ", report.rank, " calls ",
                   report.description));
    return std::nullopt;
  }
  auto& value = entry.values[static_cast<std::size_t>(report.rank)];
  if (value) {
    fail(core::str("rank ", report.rank, " reported collective ", report.sequence,
                   " twice (two processes with RANK=", report.rank, "?)"));
    return std::nullopt;
  }
  value = report.value;
  if (++entry.reports < world_size_) {
    check_left(report.sequence, entry);
    return std::nullopt;
  }
  Complete complete{report.sequence, {}};
  for (auto& v : entry.values) complete.values.push_back(std::move(*v));
  open_.erase(it);
  return complete;
}

void Ledger::leave(int rank, std::uint64_t collectives) {
  left_[static_cast<std::size_t>(rank)] = collectives;
  for (const auto& [sequence, entry] : open_) check_left(sequence, entry);
}

void Ledger::check_left(std::uint64_t sequence, const Entry& entry) {
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto& collectives = left_[static_cast<std::size_t>(rank)];
    if (!collectives || sequence < *collectives) continue;
    fail(core::str("rank ", rank, " left the group after ", *collectives, " collectives, but rank ",
                   entry.first_rank, " needs it for collective ", sequence, ", ",
                   entry.description));
  }
}

void Ledger::fail(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
}

std::string Ledger::missing_ranks(const Entry& entry) const {
  std::string text;
  int count = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (entry.values[static_cast<std::size_t>(rank)]) continue;
    text += (count++ == 0 ? "" : ", ") + std::to_string(rank);
  }
  return (count == 1 ? "rank " : "ranks ") + text;
}

void Ledger::check_deadlines(Clock::time_point now) {
  for (const auto& [sequence, entry] : open_) {
    if (now - entry.since < entry.timeout) continue;
    fail(core::str(missing_ranks(entry), " did not come to collective ", sequence, ", ",
                   entry.description, ", within ",
                   static_cast<double>(entry.timeout.count()) / 1000.0, " s of rank ",
                   entry.first_rank));
  }
}

int Ledger::left_count() const {
  int count = 0;
  for (const auto& left : left_) count += left.has_value();
  return count;
}

}  // namespace cairn::parallel
