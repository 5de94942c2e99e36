// How ranks watch each other: the census against a count of all standings, the tree of nodes in a
// simulated network that loses, delays and cuts, and the same over real sockets.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "control/control.h"
#include "control/message_status.h"
#include "control/node.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Place = RankProgress::Place;

std::string packed(const CollectiveStatus& census) {
  wire::Packer to;
  census.pack(to);
  return to.bytes();
}

RankProgress random_standing(std::mt19937& random, int rank) {
  static const std::string descriptions[] = {"all_reduce 'a'", "all_reduce 'b'", "barrier 'c'"};
  const auto place = static_cast<Place>(random() % 4);
  const bool gave_up = random() % 2 == 0;
  const std::string why = gave_up && place == Place::absent ? core::str("why ", random() % 3) : "";
  if (place == Place::absent || place == Place::left)
    return {rank, place, random() % 7, 0, "x", gave_up, why};
  const std::string& description = descriptions[random() % 3];
  return {rank, place, 8, fingerprint(description, 7), description, gave_up, ""};
}

// What ranks compare is the hash, what people read the text: they differ together.
TEST(Description, IsTheSameWhereAllOfItIs) {
  const Shape shapes[] = {{}, {3, 4}, {4, 3}, {12}};
  std::map<std::string, std::uint64_t> hashes;
  std::set<std::uint64_t> different;
  for (const char* operation : {"all_reduce", "broadcast"}) {
    for (const char* detail : {"", "sum", "from"}) {
      for (const int root : {-1, 0, 2}) {
        for (const DType dtype : {DType::f32, DType::i64}) {
          for (const Shape& shape : shapes) {
            for (const char* name :
                 {"", "w", "fc.weight", "fc.weight of the last layer", "fc.weighs"}) {
              const TensorView x(nullptr, shape, dtype, Device{});
              const Description one(operation, detail, root, x, name);
              hashes[one.text()] = one.hash();
              different.insert(one.hash());
              EXPECT_EQ(Description(operation, detail, root, x, name).hash(), one.hash());
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(hashes.size(), 2U * 3 * 3 * 2 * 4 * 5);
  EXPECT_EQ(different.size(), hashes.size());
  EXPECT_TRUE(hashes.contains("all_reduce sum f32[3, 4] 'fc.weight'"));
  EXPECT_TRUE(hashes.contains("broadcast from 2 i64[] 'w'"));
  EXPECT_EQ(Description("barrier 'x'").text(), "barrier 'x'");
  EXPECT_NE(Description("barrier 'x'").hash(), Description("barrier 'y'").hash());
  EXPECT_NE(fingerprint("barrier", 1), fingerprint("barrier", 2));
}

TEST(CollectiveStatus, IsTheSameSumInAnyOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 40);
    std::vector<RankProgress> all;
    all.reserve(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) all.push_back(random_standing(random, r));
    CollectiveStatus whole;
    for (const RankProgress& standing : all) whole.add(standing);
    std::shuffle(all.begin(), all.end(), random);
    std::vector<CollectiveStatus> parts(1 + random() % 5);
    for (const RankProgress& standing : all) parts[random() % parts.size()].add(standing);
    CollectiveStatus sum;
    for (const CollectiveStatus& part : parts) {
      const std::string bytes = packed(part);
      wire::Unpacker from(bytes);
      sum.add(CollectiveStatus::unpack(from));
    }
    EXPECT_EQ(packed(sum), packed(whole));
  }
}

TEST(CollectiveStatus, StaysSmallAndNamesTheLowest) {
  CollectiveStatus census;
  for (int rank = 9999; rank >= 0; --rank) {
    census.add({rank, rank < 5000 ? Place::inside : Place::absent, 4, 0, ""});
  }
  EXPECT_LT(packed(census).size(), 400u);
  const Stuck stuck{0, 3, 0, 10'000, Milliseconds(2000), Milliseconds(1000)};
  EXPECT_THAT(census.judge(stuck), AllOf(HasSubstr("ranks 5000, 5001"), HasSubstr("5000 in all"),
                                         HasSubstr("within 1 s of rank 0")));
}

TEST(CollectiveStatus, NothingFollowsWhereNobodyWaitsAnyMore) {
  CollectiveStatus census;
  census.add({0, Place::done, 4, 1, "a"});
  census.add({1, Place::left, 2, 0, "a"});
  EXPECT_EQ(census.judge({0, 3, 0, 2, Milliseconds(2000), Milliseconds(1000)}), "");
}

/// A rank that gave up is waited for in vain by those that did not, after the same collective.
TEST(CollectiveStatus, NamesWhoGaveUpWhereOthersDidNot) {
  const Stuck stuck{0, 5, 0, 3, Milliseconds(0), Milliseconds(1000)};
  const auto judged = [&](bool others_gave_up) {
    CollectiveStatus census;
    for (int rank = 0; rank < 3; ++rank) {
      History history(0, rank, 3);
      for (std::uint64_t s = 0; s < 5; ++s) {
        history.begin(s, "call", Milliseconds(1000));
        history.end();
      }
      if (rank == 1 || others_gave_up) history.give_up("no memory");
      if (rank != 1) history.begin(5, "call", Milliseconds(1000));
      census.add(history.standing(5));
    }
    return census.judge(stuck);
  };
  EXPECT_THAT(judged(false), AllOf(HasSubstr("rank 1 gave up: no memory"),
                                   HasSubstr("ranks 0, 2 wait for it in collective 5, call")));
  EXPECT_EQ(judged(true), "");
}

TEST(History, RemembersWhatItCalled) {
  History history(7, 2, 4);
  EXPECT_EQ(history.standing(0).place, Place::absent);
  for (std::uint64_t s = 0; s < 100; ++s) {
    history.begin(s, "call " + std::to_string(s), Milliseconds(1000));
    EXPECT_EQ(history.standing(s).place, Place::inside);
    EXPECT_EQ(history.under_way(Clock::now())->sequence, s);
    history.end();
    EXPECT_FALSE(history.under_way(Clock::now()));
    EXPECT_EQ(history.standing(s).place, Place::done);
    EXPECT_NE(history.standing(s).fingerprint, 0u);
  }
  EXPECT_EQ(history.standing(0).description, "");  // forgotten
  EXPECT_EQ(history.standing(100).description, "call 99");
  history.leave();
  EXPECT_EQ(history.standing(100).place, Place::left);
  EXPECT_EQ(history.standing(99).place, Place::done);
  EXPECT_EQ(*history.left(), (Left{7, 2, 100}));
}

TEST(History, AsksForWhatADeviceHasNotEnded) {
  History history(7, 2, 4);
  std::optional<Pending> pending = Pending{.sequence = 1, .timeout = Milliseconds(500)};
  history.watch_device([&] { return pending; });
  const auto now = Clock::now();
  for (std::uint64_t s = 0; s < 3; ++s) {
    history.begin(s, "call", Milliseconds(1000));
    if (s < 2) history.end();
  }
  // The device has not come to 1, while the host waits in 2.
  EXPECT_EQ(history.standing(0).place, Place::done);
  EXPECT_EQ(history.standing(1).place, Place::absent);
  EXPECT_EQ(history.standing(2).place, Place::absent);
  EXPECT_NE(history.standing(1).fingerprint, 0u);
  EXPECT_EQ(history.under_way(now)->sequence, 1u);
  history.end();
  EXPECT_FALSE(history.under_way(now));  // it computes

  pending->since = now - Milliseconds(300);
  history.leave();  // which the others need still
  EXPECT_EQ(history.standing(1).place, Place::inside);
  EXPECT_EQ(history.standing(3).place, Place::left);
  EXPECT_EQ(history.under_way(now)->waited, Milliseconds(300));
  EXPECT_EQ(history.under_way(now)->timeout, Milliseconds(500));
  pending.reset();
  EXPECT_EQ(history.standing(2).place, Place::done);
  EXPECT_FALSE(history.under_way(now));
}

TEST(History, TellsRanksApartThatCalledSomethingElseBefore) {
  History a(0, 0, 2), b(0, 1, 2);
  const auto call = [](History& history, std::uint64_t sequence, const char* what) {
    history.begin(sequence, what, Milliseconds(1000));
  };
  for (History* history : {&a, &b}) call(*history, 0, "barrier");
  EXPECT_EQ(a.standing(0).fingerprint, b.standing(0).fingerprint);
  call(a, 1, "broadcast from 0"), call(b, 1, "broadcast from 1");
  for (History* history : {&a, &b}) call(*history, 2, "all_to_all");
  for (const std::uint64_t s : {1u, 2u}) {
    EXPECT_NE(a.standing(s).fingerprint, b.standing(s).fingerprint) << s;
  }
}

// Each rank only sends, and both go on to a collective in which they agree.
TEST(ControlNode, NamesWhatRanksCalledBeforeTheCollectiveTheyAreStuckIn) {
  History first(0, 0, 2), second(0, 1, 2);
  for (std::uint64_t s = 0; s < 10; ++s) {
    for (History* history : {&first, &second}) {
      const bool parted = s == 6 && history == &second;
      history->begin(s, parted ? "broadcast from 1" : "broadcast from 0", Milliseconds(60'000));
    }
  }
  auto now = Clock::now();
  ControlNode::LocalProbes own;
  own.stuck = [&] { return std::vector<Stuck>{*first.under_way(now)}; };
  own.standing = [&](std::uint64_t, std::uint64_t sequence) {
    return std::vector<RankProgress>{first.standing(sequence), second.standing(sequence)};
  };
  ControlNode judge(0, 1, "", Milliseconds(1000), own, now);
  for (int i = 0; i < 10 && judge.failure().empty(); ++i) judge.tick(now += Milliseconds(300));
  EXPECT_EQ(judge.failure(),
            "ranks disagree on collective 6: rank 0 calls broadcast from 0; rank 1 calls broadcast "
            "from 1");
}

// A rank that got what another one's collective sent, in place of a message, waits to hear why.
// Whenever the root asks, and whatever else it asks about in turn, it says so in that time.
TEST(ControlNode, ExplainsAMessageThatIsMissedBeforeTheRankGivesUp) {
  constexpr Milliseconds kHeartbeat(1000), kLimit(60'000);
  for (int phase = 0; phase < 1000; phase += 100) {
    History waits(0, 0, 2), went_on(0, 1, 2);
    std::deque<History> others;
    for (const std::uint64_t group : {1u, 2u}) others.emplace_back(group, 0, 1);
    for (History& other : others) other.begin(0, "slow", kLimit);
    waits.begin_pair(1, false, "recv from 1", kLimit);
    went_on.begin(0, "barrier", kLimit);
    const auto begin = Clock::now();
    auto now = begin + Milliseconds(phase);
    ControlNode::LocalProbes own;
    own.stuck = [&] {
      std::vector<Stuck> all{*waits.under_way(now), *went_on.under_way(now)};
      for (const History& other : others) all.push_back(*other.under_way(now));
      return all;
    };
    own.standing = [&](std::uint64_t group, std::uint64_t sequence) {
      if (group != 0) return std::vector<RankProgress>{others[group - 1].standing(sequence)};
      return std::vector<RankProgress>{waits.standing(sequence), went_on.standing(sequence)};
    };
    own.meetings = [&](std::uint64_t) {
      return std::vector<MessageProgress>{*waits.meeting(now), *went_on.meeting(now)};
    };
    own.reached = [] { return std::vector<GroupProgress>{}; };
    own.warn = [](const std::string&) {};
    ControlNode judge(0, 1, "", kHeartbeat, own, now);
    while (judge.failure().empty() && now - begin < kLimit) judge.tick(now += Milliseconds(100));
    EXPECT_THAT(judge.failure(), HasSubstr("ranks wait for each other: rank 0 is in recv from 1"));
    EXPECT_LT(now - begin, ControlNode::time_to_explain(kHeartbeat)) << phase;
  }
}

/// Ranks that run scripts of messages and barriers; what they do is in real histories. With `ahead`
/// each has a device that does it, and calls up to so many things before the device has ended them.
class ScriptedRanks {
 public:
  ScriptedRanks(std::mt19937& random, bool eager, std::size_t ahead)
      : random_(random), eager_(eager), ahead_(ahead) {
    const int size = 2 + static_cast<int>(random() % 4);
    for (int r = 0; r < size; ++r) {
      ranks_.emplace_back();
      ranks_.back().history = std::make_unique<History>(0, r, size);
    }
    const int count = 1 + static_cast<int>(random() % 12);
    for (int i = 0; i < count; ++i) add_call();
    Script& lossy = ranks_[random() % ranks_.size()].script;  // one call is forgotten, at times
    if (random() % 2 == 0 && !lossy.empty()) {
      lossy.erase(lossy.begin() + static_cast<std::ptrdiff_t>(random() % lossy.size()));
    }
    for (const Rank& rank : ranks_) {
      if (rank.script.empty()) rank.history->leave();
    }
    if (ahead_ == 0) return;
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      ranks_[r].history->watch_device([this, r] { return ranks_[r].pending(); });
  }
  /// A random rank does its next thing, if it can. False: nobody can.
  bool step() {
    std::vector<int> order(ranks_.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return std::any_of(order.begin(), order.end(), [&](int r) { return advance(r); });
  }
  bool all_done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.done(); });
  }
  /// Where a barrier waits for one that is done, the census says so.
  bool barrier_is_left() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
      return rank.inside && rank.script[rank.at].peer < 0 &&
             std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& other) {
               return other.done() && other.barriers < rank.barriers;
             });
    });
  }
  std::string judge() const {
    MessageStatus sum;
    const auto later = Clock::now() + Milliseconds(10'000);
    int stuck = 0;
    for (int r = 0; r < size(); ++r) {
      MessageStatus part;
      part.add(*ranks_[static_cast<std::size_t>(r)].history->meeting(later));
      wire::Packer to;
      part.pack(to);
      wire::Unpacker from(to.bytes());
      sum.add(MessageStatus::unpack(from));
      if (ranks_[static_cast<std::size_t>(r)].inside) stuck = r;
    }
    return sum.judge({0, Stuck::kPair, stuck, size(), Milliseconds(5000), Milliseconds(60'000)});
  }

 private:
  struct Call {
    int peer = -1;  // none: a barrier
    bool sends = false;
  };
  using Script = std::vector<Call>;
  struct Called {
    std::uint64_t sequence = 0;
    std::optional<PairMessage> message;
  };
  struct Rank {
    std::unique_ptr<History> history;
    Script script;
    std::vector<Called> called;
    std::uint64_t barriers_called = 0;
    // Where the rank is, or its device.
    std::size_t at = 0;
    bool inside = false;
    std::uint64_t barriers = 0;                            // begun
    std::map<std::pair<int, bool>, int> begun, completed;  // messages, by peer
    bool done() const { return at == script.size(); }

    std::optional<Pending> pending() const {
      if (at == called.size()) return std::nullopt;
      Pending pending{.timeout = Milliseconds(60'000)};
      if (inside) pending.since = Clock::now();
      for (std::size_t i = at; i < called.size(); ++i) {
        const Called& each = called[i];
        if (each.message && i == at && inside) {
          pending.message = each.message;
        } else if (each.message) {
          pending.to_come.push_back(*each.message);
        } else if (!pending.sequence) {
          pending.sequence = each.sequence;
        }
      }
      return pending;
    }
  };
  int size() const { return static_cast<int>(ranks_.size()); }

  void add_call() {
    if (random_() % 4 == 0) {
      for (Rank& rank : ranks_) rank.script.push_back({});
      return;
    }
    const int from = static_cast<int>(random_() % ranks_.size());
    const int to = (from + 1 + static_cast<int>(random_() % (ranks_.size() - 1))) % size();
    ranks_[static_cast<std::size_t>(from)].script.push_back({to, true});
    ranks_[static_cast<std::size_t>(to)].script.push_back({from, false});
  }
  bool can_end(int r, const Call& call) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    if (call.peer < 0) {
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [&](const Rank& other) { return other.barriers >= rank.barriers; });
    }
    if (call.sends && eager_) return true;
    Rank& other = ranks_[static_cast<std::size_t>(call.peer)];
    return other.begun[{r, !call.sends}] > rank.completed[{call.peer, call.sends}];
  }
  void call(Rank& rank) {
    const Call call = rank.script[rank.called.size()];
    if (call.peer < 0) {
      rank.called.push_back({rank.barriers_called, std::nullopt});
      rank.history->begin(rank.barriers_called++, "barrier", Milliseconds(60'000));
    } else {
      rank.called.push_back(
          {0, rank.history->begin_pair(call.peer, call.sends, "message", Milliseconds(60'000))});
    }
  }
  void end_call(Rank& rank) {
    rank.history->end();
    if (rank.called.size() == rank.script.size()) rank.history->leave();
  }
  bool call_ahead(Rank& rank) {
    const std::size_t called = rank.called.size();
    if (called == rank.script.size() || called - rank.at >= ahead_) return false;
    call(rank);
    end_call(rank);
    return true;
  }
  bool advance(int r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    if (random_() % 2 == 0) return call_ahead(rank) || go_on(r);
    return go_on(r) || call_ahead(rank);
  }
  bool go_on(int r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    if (rank.done()) return false;
    const Call call = rank.script[rank.at];
    if (!rank.inside) {
      if (ahead_ == 0) this->call(rank);
      if (rank.at == rank.called.size()) return false;
      rank.inside = true;
      if (call.peer < 0) {
        ++rank.barriers;
      } else {
        ++rank.begun[{call.peer, call.sends}];
      }
      if (!call.sends || !eager_) return true;
    }
    if (!can_end(r, call)) return false;
    if (call.peer >= 0) ++rank.completed[{call.peer, call.sends}];
    rank.inside = false;
    ++rank.at;
    if (ahead_ == 0) end_call(rank);
    return true;
  }

  std::mt19937& random_;
  bool eager_;
  std::size_t ahead_;
  std::vector<Rank> ranks_;
};

// Random scripts, stopped at random: whoever is told to wait for ever does, and who does is told.
TEST(MessageStatus, NameThoseWhoWaitForEachOtherAndNobodyElse) {
  std::mt19937 random(20261122);
  int told = 0, well = 0;
  for (int round = 0; round < 6000; ++round) {
    ScriptedRanks ranks(random, round % 2 == 0, random() % 4);
    const auto steps = random() % 40;
    for (unsigned i = 0; i < steps && ranks.step(); ++i) {
    }
    const std::string early = ranks.judge();
    while (ranks.step()) {
    }
    if (ranks.all_done()) {
      ASSERT_EQ(early, "") << round;
      ++well;
      continue;
    }
    const std::string late = ranks.judge();
    ASSERT_TRUE(!late.empty() || ranks.barrier_is_left()) << round;
    told += !late.empty();
  }
  EXPECT_GT(told, 1000);
  EXPECT_GT(well, 1000);
}

TEST(MessageStatus, SayAtTheLimitWhoDidNotCome) {
  History waiting(0, 3, 4), busy(0, 1, 4);
  waiting.begin_pair(1, false, "recv from 1 tag 7 f32[4] 'x'", Milliseconds(1000));
  MessageStatus all;
  for (const History* history : {&waiting, &busy}) {
    all.add(*history->meeting(Clock::now() + Milliseconds(2000)));
  }
  const Stuck stuck{0, Stuck::kPair, 3, 4, Milliseconds(900), Milliseconds(1000)};
  EXPECT_EQ(all.judge(stuck), "");
  EXPECT_EQ(all.judge({0, Stuck::kPair, 3, 4, Milliseconds(1500), Milliseconds(1000)}),
            "rank 3 has waited 1.5 s in recv from 1 tag 7 f32[4] 'x'; rank 1 is in none, after 0 "
            "collectives (the limit is 1 s)");
}

/// Ranks in a network with a clock of its own.
class SimulatedJob {
 public:
  static constexpr Milliseconds kHeartbeat{2000};

  SimulatedJob(int size, std::uint32_t seed, double loss, int delay_ms)
      : random_(seed), loss_(loss), delay_ms_(delay_ms), ranks_(static_cast<std::size_t>(size)) {
    for (int r = 0; r < size; ++r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      ControlNode::LocalProbes own;
      own.stuck = [&rank] {
        return rank.inside ? std::vector<Stuck>{*rank.inside} : std::vector<Stuck>{};
      };
      own.standing = [&rank](std::uint64_t, std::uint64_t sequence) {
        return std::vector<RankProgress>{rank.history->reached() ? rank.history->standing(sequence)
                                                                 : rank.standing(sequence)};
      };
      own.reached = [&rank] {
        const auto reached = rank.history->reached();
        return reached ? std::vector<GroupProgress>{*reached} : std::vector<GroupProgress>{};
      };
      rank.history = std::make_unique<History>(0, r, size);
      own.warn = [](const std::string&) {};
      rank.rank = r;
      rank.node = std::make_unique<ControlNode>(r, size, "host", kHeartbeat, own, now_);
    }
  }

  struct Rank {
    int rank = 0;
    std::unique_ptr<ControlNode> node;
    std::unique_ptr<History> history;  // of collectives that nobody waits for
    bool alive = true;                 // false: it neither sends nor hears
    bool running = true;               // it calls collectives
    std::uint64_t started = 0;
    std::string description;
    std::optional<Stuck> inside;
    bool has_left = false;
    std::uint64_t sent = 0, bytes = 0;

    RankProgress standing(std::uint64_t sequence) const {
      if (sequence >= started) {
        return {rank, has_left ? Place::left : Place::absent, started, 0, description};
      }
      const bool current = inside && sequence + 1 == started;
      return {rank, current ? Place::inside : Place::done, started,
              current ? fingerprint(description, sequence) : 0, description};
    }
  };

  Rank& operator[](int r) { return ranks_[static_cast<std::size_t>(r)]; }
  int size() const { return static_cast<int>(ranks_.size()); }

  void call(int r, const std::string& description, Milliseconds timeout) {
    Rank& rank = (*this)[r];
    rank.description = description;
    rank.inside = Stuck{0, rank.started++, r, size(), Milliseconds(0), timeout};
  }
  /// All that are in the same collective get out of it together.
  void finish_collectives() {
    std::set<std::pair<std::uint64_t, std::string>> kinds;
    for (const Rank& rank : ranks_) {
      if (!rank.alive || rank.has_left || !rank.inside) return;
      kinds.insert({rank.started, rank.description});
    }
    if (kinds.size() != 1) return;
    for (Rank& rank : ranks_) rank.inside.reset();
  }
  void advance(Milliseconds time) {
    for (const auto end = now_ + time; now_ < end; step()) {
    }
  }
  /// Whether every rank that lives has heard of a failure.
  bool all_know() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
      return !rank.alive || !rank.node->failure().empty();
    });
  }
  std::string failure_of(int r) { return (*this)[r].node->failure(); }

 private:
  void step() {
    now_ += Milliseconds(10);
    for (Rank& rank : ranks_) {
      if (rank.inside) rank.inside->waited += Milliseconds(10);
    }
    while (!network_.empty() && network_.begin()->first <= now_) {
      const auto [to, from, bytes] = network_.begin()->second;
      network_.erase(network_.begin());
      Rank& rank = (*this)[to];
      if (!rank.alive) continue;
      if (from == ControlNode::parent_of(to)) {
        rank.node->hear(ControlNode::ParentMessage::unpack(bytes), now_);
      } else {
        rank.node->hear(ControlNode::Report::unpack(bytes), now_);
      }
    }
    for (Rank& rank : ranks_) {
      if (!rank.alive) continue;
      rank.node->tick(now_);
      for (const auto& message : rank.node->take_messages(now_)) {
        ++rank.sent;
        rank.bytes += message.bytes.size();
        if (std::uniform_real_distribution<>(0, 1)(random_) < loss_) continue;
        const auto delay =
            Milliseconds(delay_ms_ == 0 ? 0 : random_() % static_cast<unsigned>(delay_ms_));
        network_.emplace(now_ + delay, std::tuple(message.to, rank.rank, message.bytes));
      }
    }
  }

  std::mt19937 random_;
  double loss_;
  int delay_ms_;
  std::vector<Rank> ranks_;
  Clock::time_point now_{};
  std::multimap<Clock::time_point, std::tuple<int, int, std::string>> network_;
};

constexpr Milliseconds kLimit{20'000};

// A fifth of all messages is lost and the others come late, for a minute: nobody is called dead.
TEST(ControlNode, NobodyIsCalledDeadForLostMessages) {
  for (const int size : {2, 17, 40}) {
    SimulatedJob job(size, 3, 0.2, 300);
    for (int round = 0; round < 60; ++round) {
      for (int r = 0; r < size; ++r) job.call(r, "all_reduce 'w'", Milliseconds(5000));
      job.advance(Milliseconds(round % 3 == 0 ? 1500 : 200));
      job.finish_collectives();
      job.advance(Milliseconds(300));
      for (int r = 0; r < size; ++r) ASSERT_EQ(job.failure_of(r), "") << size << " " << round;
    }
  }
}

// Random faults in random jobs: every rank that lives hears of it within the limit, and the first
// culprit is named.
TEST(ControlNode, TellsItsChildrenOfAFailureBeforeTheNextHeartbeat) {
  const auto start = Clock::now();
  const auto at = [&](int ms) { return start + Milliseconds(ms); };
  const auto own = ControlNode::probes_of([] { return ControlNode::Histories(); });
  ControlNode root(0, 2, "host", Milliseconds(2000), own, start);
  ControlNode::Report report;
  report.rank = 1;
  root.hear(report, at(10));
  root.tick(at(10));
  root.take_messages(at(10));
  root.fail("the disk is full");
  root.tick(at(11));
  const auto messages = root.take_messages(at(11));
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].to, 1);
  EXPECT_EQ(ControlNode::ParentMessage::unpack(messages[0].bytes).failure, "the disk is full");
}

TEST(ControlNode, AConnectionThatIsMadeAnewIsNoSignOfDeath) {
  const auto start = Clock::now();
  const auto own = ControlNode::probes_of([] { return ControlNode::Histories(); });
  for (const bool made_anew : {true, false}) {
    ControlNode root(0, 2, "host", Milliseconds(8000), own, start);
    ControlNode::Report report;
    report.rank = 1;
    root.hear(report, start);
    root.set_connected(1, false, start + Milliseconds(100));
    if (made_anew) root.set_connected(1, true, start + Milliseconds(200));
    root.tick(start + Milliseconds(4000));  // half of the time for which it may be silent
    EXPECT_EQ(root.failure().empty(), made_anew) << root.failure();
  }
}

/// A root of two ranks that has heard of rank 1 at `start`.
ControlNode root_of_two(Clock::time_point start) {
  ControlNode root(0, 2, "host", Milliseconds(8000),
                   ControlNode::probes_of([] { return ControlNode::Histories(); }), start);
  ControlNode::Report report;
  report.rank = 1;
  root.hear(report, start);
  return root;
}

TEST(ControlNode, ASilenceSaysHowMuchWouldBeAllowed) {
  const auto start = Clock::now();
  ControlNode root = root_of_two(start);
  root.tick(start + Milliseconds(14'000));
  EXPECT_THAT(root.failure(),
              AllOf(HasSubstr("rank 1 died"), HasSubstr("no sign of life for 14 s"),
                    HasSubstr("(GroupOptions::heartbeat_timeout or CAIRN_HEARTBEAT_TIMEOUT is 8 "
                              "s: set more where machines are paused for longer)")));
}

// A machine that is paused hears nobody meanwhile.
TEST(ControlNode, WhoSleptHoldsNobodysSilenceAgainstThem) {
  const auto start = Clock::now();
  for (const bool closed : {false, true}) {
    ControlNode root = root_of_two(start);
    if (closed) root.set_connected(1, false, start);
    root.slept(Milliseconds(14'000));
    root.tick(start + Milliseconds(14'100));
    EXPECT_EQ(root.failure(), "");
    root.tick(start + Milliseconds(14'000 + 8'100));
    EXPECT_THAT(root.failure(), HasSubstr("rank 1 died"));
  }
}

TEST(History, WhatIsUnderWayDoesNotWaitWhereTheProcessSleeps) {
  History history(0, 0, 2);
  history.begin(0, "barrier", Milliseconds(60'000));
  const auto later = Clock::now() + Milliseconds(30'000);
  const Milliseconds before = history.under_way(later)->waited;
  EXPECT_GE(before, Milliseconds(30'000));
  std::this_thread::sleep_for(Milliseconds(50));
  history.slept(Milliseconds(10));
  EXPECT_EQ(before - history.under_way(later)->waited, Milliseconds(10));
  history.slept(Milliseconds(20'000));  // never into the future
  EXPECT_GE(history.under_way(Clock::now())->waited, Milliseconds(0));
}

TEST(ControlNode, NamesTheCulpritOfRandomFaults) {
#if defined(__SANITIZE_THREAD__)
  constexpr int kRounds = 15;
#else
  constexpr int kRounds = 150;
#endif
  std::mt19937 random(20261122);
  for (int round = 0; round < kRounds; ++round) {
    const int size = 2 + static_cast<int>(random() % (round % 10 == 0 ? 300 : 40));
    SimulatedJob job(size, random(), random() % 2 * 0.1, static_cast<int>(random() % 200));
    job.advance(Milliseconds(500 + random() % 2000));
    const int culprit = static_cast<int>(random() % static_cast<unsigned>(size));
    const int fault = static_cast<int>(random() % 5);
    const std::string who = "rank " + std::to_string(culprit);
    for (int r = 0; r < size; ++r) {
      if (r != culprit) job.call(r, "all_reduce 'w'", Milliseconds(3000));
    }
    if (fault == 0) job[culprit].alive = false;
    if (fault == 1) job.call(culprit, "all_reduce 'other'", Milliseconds(3000));
    if (fault == 3) {
      job[culprit].has_left = true;  // the group; its process lives
    }
    if (fault == 4) job[culprit].node->fail(who + " gave up");
    job.advance(kLimit);  // fault 2: it never comes
    ASSERT_TRUE(job.all_know()) << "fault " << fault << " of " << who << " of " << size;
    const char* const words[] = {" died", "'other'", " did not come", " left the group",
                                 " gave up"};
    for (int r = 0; r < size; ++r) {
      if (!job[r].alive) continue;
      ASSERT_THAT(job.failure_of(r), HasSubstr(words[fault])) << size;
      ASSERT_THAT(job.failure_of(r), HasSubstr(who)) << size;
    }
  }
}

// Collectives that are queued on a GPU: no rank waits in one, and their data has no fingerprint.
// One that differs, once, among equal ones before and after, is found all the same.
TEST(ControlNode, AuditsWhatMovesUntagged) {
  for (const int size : {2, 20, 100}) {
    for (const bool differs : {false, true}) {
      SimulatedJob job(size, 11, 0.1, 100);
      for (int r = 0; r < size; ++r) job[r].history->mark_untagged();
      for (std::uint64_t s = 0; s < 2000; ++s) {
        for (int r = 0; r < size; ++r) {
          const bool other = differs && s == 777 && r == size - 1;
          job[r].history->begin(s, other ? "all_reduce 'b'" : "all_reduce 'a'", Milliseconds(9000));
          job[r].history->end();
        }
        if (s % 4 == 0) job.advance(Milliseconds(10));
      }
      job.advance(kLimit);
      EXPECT_EQ(job.all_know(), differs) << size;
      if (differs) {
        EXPECT_THAT(job.failure_of(0), AllOf(HasSubstr("ranks disagree on"),
                                             HasSubstr("rank " + std::to_string(size - 1))));
      }
    }
  }
}

TEST(ControlNode, EndsInAnyOrder) {
  std::mt19937 random(5);
  for (const int size : {2, 18, 60}) {
    SimulatedJob job(size, 1, 0.1, 100);
    std::vector<int> order(static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) order[static_cast<std::size_t>(r)] = r;
    std::shuffle(order.begin(), order.end(), random);
    for (const int r : order) {
      job[r].node->leave(Left{0, r, 0});
      job[r].node->leave();
      job.advance(Milliseconds(100));
      for (int s = 0; s < size; ++s) {  // whose process may end does
        if (job[s].alive && job[s].node->may_go()) job[s].alive = false;
      }
    }
    job.advance(Milliseconds(10'000));
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(!job[r].alive || job[r].node->may_go()) << r << " of " << size;
      EXPECT_EQ(job.failure_of(r), "");
    }
  }
}

// What a rank sends in ten seconds of steps that all take long enough to be asked about.
TEST(ControlNode, SendsAsMuchInAnyJob) {
  for (const int size : {2, 16, 64, 256, 1024}) {
    SimulatedJob job(size, 1, 0.0, 20);
    for (int round = 0; round < 20; ++round) {
      for (int r = 0; r < size; ++r) job.call(r, "all_reduce 'w'", Milliseconds(60'000));
      job.advance(Milliseconds(500));
      job.finish_collectives();
    }
    std::uint64_t sent = 0, bytes = 0;
    for (int r = 0; r < size; ++r) sent += job[r].sent, bytes += job[r].bytes;
    const auto ranks = static_cast<std::uint64_t>(size);
    RecordProperty("messages_of_" + std::to_string(size), std::to_string(sent / ranks));
    EXPECT_LE(sent / ranks, 150u) << size;  // 15 a second, whatever the size
    EXPECT_LE(bytes / ranks, 40'000u) << size;
  }
}

/// What a control learnt.
struct Heard {
  std::promise<std::string> promise;
  std::function<void(const std::string&)> callback() {
    return [this](const std::string& reason) { promise.set_value(reason); };
  }
  std::string wait(Milliseconds timeout) {
    auto future = promise.get_future();
    return future.wait_for(timeout) == std::future_status::ready ? future.get() : "nothing";
  }
};

Control::Options options_of(int rank, Heard& heard, Milliseconds heartbeat = Milliseconds(2000)) {
  const std::string token = "0123456789abcdef0123456789abcdef";
  return {rank, 2, "127.0.0.1", token, heartbeat, heard.callback(), {}};
}

/// Rank 0 and rank 1 of a job of two, in one process.
struct Pair {
  explicit Pair(Milliseconds heartbeat = Milliseconds(2000),
                std::function<std::string()> trouble = {}) {
    auto options = options_of(0, heard[0], heartbeat);
    options.check_devices = std::move(trouble);
    root = std::make_unique<Control>(std::move(options));
    child = std::make_unique<Control>(options_of(1, heard[1], heartbeat));
    root->start(42, {});
    child->start(42, {"127.0.0.1", root->port(), "0123456789abcdef0123456789abcdef"});
  }
  Heard heard[2];
  std::unique_ptr<Control> root, child;
};

TEST(Control, NamesARankWhoseConnectionClosed) {
  Pair pair(Milliseconds(8000));
  std::this_thread::sleep_for(Milliseconds(700));
  pair.child.reset();
  EXPECT_THAT(pair.heard[0].wait(Milliseconds(6000)), HasSubstr("rank 1 died (pid"));
}

TEST(Control, AChildNoticesThatItsParentIsGone) {
  Pair pair(Milliseconds(1000));
  std::this_thread::sleep_for(Milliseconds(300));
  pair.root.reset();
  EXPECT_THAT(pair.heard[1].wait(Milliseconds(5000)), HasSubstr("rank 0 died (pid"));
}

TEST(Control, SpreadsAReasonToAll) {
  Pair pair;
  pair.child->break_job("rank 1 gave up");
  EXPECT_EQ(pair.heard[0].wait(Milliseconds(4000)), "rank 1 gave up");
  EXPECT_EQ(pair.heard[1].wait(Milliseconds(4000)), "rank 1 gave up");
}

TEST(Control, SpreadsTheTroubleOfADevice) {
  Pair pair(Milliseconds(2000), [] { return std::string("rank 0 failed: collective 3"); });
  EXPECT_EQ(pair.heard[0].wait(Milliseconds(8000)), "rank 0 failed: collective 3");
  EXPECT_EQ(pair.heard[1].wait(Milliseconds(8000)), "rank 0 failed: collective 3");
}

TEST(Control, LeavesTogether) {
  Pair pair;
  auto root = std::async(std::launch::async, [&] { pair.root->leave(); });
  EXPECT_EQ(root.wait_for(Milliseconds(600)), std::future_status::timeout);
  pair.child->leave();
  pair.child.reset();
  root.get();
  pair.root.reset();
  for (Heard& heard : pair.heard) EXPECT_EQ(heard.wait(Milliseconds(0)), "nothing");
}

TEST(Control, HearsNothingOfAnotherJob) {
  Heard own, stranger;
  Control root(options_of(0, own, Milliseconds(1000)));
  root.start(1, {});
  Control other(options_of(1, stranger, Milliseconds(1000)));
  other.start(2, {"127.0.0.1", root.port(), "0123456789abcdef0123456789abcdef"});
  other.break_job("from an earlier life");
  EXPECT_THAT(own.wait(Milliseconds(8000)), HasSubstr("rank 1 died"));
}

}  // namespace
}  // namespace cairn::parallel
