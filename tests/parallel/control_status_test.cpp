// What ranks know of each other: sums of their standings against a count of all, their histories,
// and who waits for whom in random scripts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include "control/collective_status.h"
#include "control/history.h"
#include "control/message_status.h"
#include "control/node.h"
#include "support/search.h"

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
  std::mt19937 random(static_cast<unsigned>(test::search_seed()));
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

}  // namespace
}  // namespace cairn::parallel
