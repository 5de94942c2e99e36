// The ledger of a group's collectives: who has come to which one, whether they agree, and who will
// never come.
//
// Every rank reports each collective it starts: its number (0, 1, ... per rank, in program order),
// a description ("all_reduce sum f32[1024] 'fc.weight'") and a value to hand around. A collective
// is complete when every rank has reported it. The first report that differs, the first rank that
// leaves or fails while others need it, and a collective that stays incomplete too long break the
// group: failure() then says why, for everybody, for good. Pure bookkeeping: the store's server and
// the in-process group both keep one.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::parallel {

/// Thrown to who needs a group that is broken; reason() is what every rank hears.
class GroupBroken : public core::CommunicationError {
 public:
  GroupBroken(std::string_view where, const std::string& reason)
      : CommunicationError(core::str("[", where, "] ", reason)), reason_(reason) {}
  const std::string& reason() const { return reason_; }

 private:
  std::string reason_;
};

class Ledger {
 public:
  using Clock = std::chrono::steady_clock;

  struct Report {
    int rank = 0;
    std::uint64_t sequence = 0;
    std::string description;
    std::string value;
    std::chrono::milliseconds timeout{0};  // how long it may stay incomplete
  };
  /// A collective that everybody has come to: the ranks' values in rank order.
  struct Complete {
    std::uint64_t sequence = 0;
    std::vector<std::string> values;
  };

  explicit Ledger(int world_size)
      : world_size_(world_size), left_(static_cast<std::size_t>(world_size)) {}

  /// Takes a report; returns the collective if this completes it.
  std::optional<Complete> report(const Report& report, Clock::time_point now);
  /// The rank takes part no more, having started `collectives` of them.
  void leave(int rank, std::uint64_t collectives);
  void fail(const std::string& reason);
  void check_deadlines(Clock::time_point now);

  const std::string& failure() const { return failure_; }  // empty: all is well
  bool has_left(int rank) const { return left_[static_cast<std::size_t>(rank)].has_value(); }
  int left_count() const;

 private:
  struct Entry {
    std::string description;
    int first_rank = 0;
    std::vector<std::optional<std::string>> values;
    int reports = 0;
    Clock::time_point since;
    std::chrono::milliseconds timeout{0};
  };
  std::string missing_ranks(const Entry& entry) const;
  void check_left(std::uint64_t sequence, const Entry& entry);

  int world_size_;
  std::map<std::uint64_t, Entry> open_;
  std::vector<std::optional<std::uint64_t>> left_;
  std::string failure_;
};

}  // namespace cairn::parallel
