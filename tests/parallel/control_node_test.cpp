// How ranks watch each other: the tree of nodes in a simulated network that loses, delays and cuts,
// and the same over real sockets.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "control/control.h"
#include "control/node.h"
#include "support/expect_error.h"
#include "support/search.h"

namespace cairn::parallel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Place = RankProgress::Place;

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
      own.status_asked = [this] { return status_asked; };
      own.status = [r] { return "rank " + std::to_string(r); };
      own.tell_status = [this, r](std::uint64_t number, const std::vector<std::string>& all) {
        EXPECT_EQ(r, 0);
        EXPECT_EQ(std::exchange(status_asked, 0), number);
        told.push_back(all);
      };
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

  std::uint64_t status_asked = 0;              // of rank 0, by somebody outside
  std::vector<std::vector<std::string>> told;  // what it answered

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

/// Each rank once; in little more than the way down and up.
TEST(ControlNode, CollectsWhatEachRankTells) {
  for (const int size : {1, 2, 17, 18, 256, 300}) {
    SimulatedJob job(size, 1, 0, 1);
    job.advance(Milliseconds(3000));
    for (const std::uint64_t number : {7, 8}) {
      job.status_asked = number;
      job.advance(Milliseconds(400));
      ASSERT_EQ(job.status_asked, 0u) << size;
      const std::set<std::string> all(job.told.back().begin(), job.told.back().end());
      EXPECT_EQ(job.told.back().size(), static_cast<std::size_t>(size));
      EXPECT_EQ(all.size(), static_cast<std::size_t>(size));
    }
    const std::uint64_t before = job[0].bytes;
    job.advance(Milliseconds(1000));
    EXPECT_EQ(job.told.size(), 2u) << "told again";
    EXPECT_LT(job[0].bytes - before, 20'000u);
  }
}

TEST(ControlNode, DoesNotWaitForARankThatDoesNotTell) {
  SimulatedJob job(40, 1, 0, 1);
  job.advance(Milliseconds(3000));
  job[2].alive = false;  // and its children, 33 to 39, with it
  job.status_asked = 7;
  job.advance(Milliseconds(1600));
  ASSERT_EQ(job.told.size(), 1u);
  EXPECT_EQ(job.told[0].size(), 40u - 1 - 7);
}

/// The last that was heard of rank 3 is its answer to the question before.
TEST(ControlNode, TakesNoAnswerToAnEarlierQuestion) {
  SimulatedJob job(10, 1, 0, 1);
  job.advance(Milliseconds(3000));
  job.status_asked = 7;
  while (job.status_asked != 0) job.advance(Milliseconds(10));
  job[3].alive = false;
  job.status_asked = 8;
  job.advance(Milliseconds(1600));
  ASSERT_EQ(job.told.size(), 2u);
  EXPECT_EQ(job.told[0].size(), 10u);
  EXPECT_EQ(job.told[1].size(), 9u);
}

/// Messages are lost; what is missing comes with later ones.
TEST(ControlNode, CollectsOverANetworkThatLosesMessages) {
  SimulatedJob job(100, 5, 0.3, 5);
  job.advance(Milliseconds(3000));
  job.status_asked = 7;
  job.advance(Milliseconds(1600));
  ASSERT_EQ(job.told.size(), 1u);
  EXPECT_GT(job.told[0].size(), 80u);
}

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
  constexpr int kJobs = 15;
#else
  constexpr int kJobs = 150;
#endif
  for (const std::uint64_t seed : test::search_seeds(kJobs)) {
    SCOPED_TRACE(seed);
    std::mt19937 random(static_cast<unsigned>(seed));
    const int size = 2 + static_cast<int>(random() % (seed % 10 == 0 ? 300 : 40));
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
