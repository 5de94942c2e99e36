// Where all ranks stand, seen from one collective that does not end, and what follows from it.
//
// A census is a sum: those of parts of the ranks add up, in any order, to that of all. It stays
// small however many ranks there are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "control/history.h"
#include "store/wire.h"

namespace cairn::parallel {

class CollectiveStatus {
 public:
  void add(const RankProgress& standing);
  void add(const CollectiveStatus& other);
  /// Counts a rank that left before the census: as done with what it had called.
  void add(const Left& left, std::uint64_t sequence);

  /// Why the collective can never end; empty: it may still.
  std::string judge(const Stuck& stuck) const;
  /// That ranks called different ones, this time or longer ago than they remember; empty: they did
  /// not.
  std::string disagreement(std::uint64_t sequence) const;
  /// Whether ranks may have called something else before: those that call the same now have, or
  /// some have not come.
  bool may_have_parted() const { return absent_.count > 0 || parted_before(); }
  /// For whom or what it waits, for people to read.
  std::string describe(const Stuck& stuck) const;

  void pack(wire::Packer& to) const;
  static CollectiveStatus unpack(wire::Unpacker& from);
  bool operator==(const CollectiveStatus&) const = default;

 private:
  static constexpr std::size_t kNamed = 8;  // ranks that are named

  struct Ranks {
    std::uint64_t count = 0;
    std::vector<int> lowest;  // up to kNamed of them, in order
    void add(int rank);
    void add(const Ranks& other);
    std::string text() const;  // "rank 3", "ranks 1, 2", "ranks 1, 2, ... (40 in all)"
    bool operator==(const Ranks&) const = default;
  };
  /// Ranks that called the same.
  struct CollectiveGroup {
    std::uint64_t fingerprint = 0;
    Ranks ranks;
    std::string description;
    bool operator==(const CollectiveGroup&) const = default;
  };
  void add_kind(const CollectiveGroup& kind);
  void add_gave_up(const Ranks& ranks, const std::string& why);
  bool parted_before() const;
  std::string name(const Stuck& stuck) const;  // "collective 41, all_reduce ..."
  std::uint64_t counted() const {
    return absent_.count + left_.count + inside_.count + done_.count;
  }

  std::vector<CollectiveGroup> kinds_;  // by fingerprint, at most kNamed
  Ranks absent_, left_, inside_, done_;
  std::uint64_t left_after_ = 0;  // collectives that the lowest rank of left_ had called
  Ranks gave_up_;                 // of absent_
  std::string why_;               // the lowest of them did
  Ranks went_on_;                 // of inside_: those that had not given up there
};

}  // namespace cairn::parallel
