// What a rank remembers of the collectives it called: enough to say, when one does not end, who has
// not come, who called another one, and who left. Nothing of it is sent while all goes well.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "clock.h"
#include "control/description.h"

namespace cairn::parallel {

/// A collective, or a message between two ranks, that has not ended on some rank.
struct Stuck {
  static constexpr std::uint64_t kPair = ~std::uint64_t{1};  // a sequence: that of messages
  std::uint64_t group = 0;
  std::uint64_t sequence = 0;
  int rank = 0;
  int world_size = 1;
  Milliseconds waited{0};
  Milliseconds timeout{0};
};

/// A message between this rank and another.
struct PairMessage {
  int peer = 0;
  bool sends = false;        // to the peer; false: receives from it
  std::uint64_t number = 0;  // among those of its direction
};

/// What was called and the device has not ended: collectives and messages, one after the other.
struct Pending {
  std::optional<std::uint64_t> sequence;   // of the oldest collective
  std::optional<PairMessage> message;      // the device is in it, ahead of all collectives
  std::string what;                        // of the message
  std::vector<PairMessage> to_come;        // messages that the device has not come to
  std::optional<Clock::time_point> since;  // when the device was seen in the oldest of all
  Milliseconds timeout{0};
};

/// Where a rank stands, seen from one collective.
struct RankProgress {
  enum class Place : std::uint8_t { absent, left, inside, done };
  int rank = 0;
  Place place = Place::absent;
  std::uint64_t started = 0;      // collectives that the rank has called
  std::uint64_t fingerprint = 0;  // of this one and all before it; 0: not come, or forgotten
  std::string description;        // of this one; of the last one where it has not come
  bool gave_up = false;  // between the one before and this one (the next one, if it has not come)
  std::string why;       // it gave up and has not come
};

/// Where a rank stands among the messages between two ranks of a group.
struct MessageProgress {
  enum class Place : std::uint8_t { outside, collective, sending, receiving, left };
  struct Messages {
    int peer = 0;
    bool sends = false;
    std::uint64_t count = 0;  // begun
  };
  int rank = 0;
  Place place = Place::outside;
  int peer = 0;               // of sending and receiving
  std::uint64_t number = 0;   // the collective's; the message's, among those of its direction
  std::uint64_t started = 0;  // collectives that the rank has called
  Milliseconds waited{0};
  std::string what;
  std::vector<Messages> begun;
};

/// How far ranks are in a group whose data cannot tell what it belongs to (a GPU library's): the
/// least of them. Audits compare what they called.
struct GroupProgress {
  std::uint64_t group = 0;
  std::uint64_t started = 0;
  std::uint64_t ranks = 0;
  std::uint64_t world_size = 0;
};

/// A rank that takes part no more, after `started` collectives.
struct Left {
  std::uint64_t group = 0;
  int rank = 0;
  std::uint64_t started = 0;
  bool operator==(const Left&) const = default;
};

/// One rank's collectives in one group. Safe to use from several threads; collectives begin and end
/// one after the other.
class History {
 public:
  /// `name` follows each collective's description: " in the group of ranks 1, 3".
  History(std::uint64_t group, int rank, int world_size, std::string name = {});
  std::uint64_t group() const { return group_; }

  void begin(std::uint64_t sequence, const Description& description, Milliseconds timeout);
  /// A message between this rank and the job's rank `peer`.
  PairMessage begin_pair(int peer, bool sends, std::string description, Milliseconds timeout);
  /// Data of this group moves without a fingerprint.
  void mark_untagged();
  /// The host is done with it; a device may not be.
  void end();
  /// Asked for what a device has not ended.
  void watch_device(std::function<std::optional<Pending>()> pending);
  /// Until its next collective the rank leaves out some that others may be in.
  void give_up(std::string why);
  /// Where it gave up and has not gone on; else empty.
  std::string why_given_up() const;
  void leave();

  /// This process did not run for so long: what is under way has not waited then.
  void slept(Clock::duration time);

  /// What a device has not ended.
  std::optional<Pending> pending() const;
  /// The oldest collective or message that is under way.
  std::optional<Stuck> under_way(Clock::time_point now) const;
  RankProgress standing(std::uint64_t sequence) const;
  /// Empty where the rank has exchanged messages with too many others to tell.
  std::optional<MessageProgress> meeting(Clock::time_point now) const;
  std::optional<GroupProgress> reached() const;
  std::optional<Left> left() const;

 private:
  std::string description(std::uint64_t sequence) const;  // needs mutex_
  MessageProgress on_host(Clock::time_point now) const;   // needs mutex_
  void see_device(MessageProgress& meeting, const Pending& pending,
                  Clock::time_point now) const;  // too

  static constexpr std::size_t kRemembered = 64, kTrails = 4096, kMostPeers = 64;

  const std::uint64_t group_;
  const int rank_;
  const int world_size_;
  const std::string name_;
  mutable std::mutex mutex_;
  // Of collective s at s % size. A trail is the fingerprint of it and of all before it.
  std::array<Description, kRemembered> descriptions_;
  std::array<std::uint64_t, kTrails> trails_{};
  std::uint64_t started_ = 0;
  std::optional<std::uint64_t> gave_up_;  // after so many
  std::string why_;
  bool untagged_ = false;
  std::function<std::optional<Pending>()> pending_;
  bool inside_ = false;
  bool left_ = false;
  std::vector<MessageProgress::Messages> messages_;
  std::optional<MessageProgress> pair_;  // under way
  Clock::time_point since_;
  Milliseconds timeout_{0};
};

}  // namespace cairn::parallel
