#include "control/node.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/status.h"

namespace cairn::parallel {
namespace {

using wire::Packer;
using wire::Unpacker;

constexpr std::size_t kMostStuck = 4;
constexpr auto kMoment = Milliseconds(250);  // for which a collective may take before anybody asks
constexpr auto kAgain = Milliseconds(1000);  // between questions
constexpr auto kSoon = Milliseconds(500);    // likewise, where a wait may soon be judged
constexpr auto kLastWords = Milliseconds(2000);       // for which a rank stays to tell why it ends
constexpr auto kStatusPatience = Milliseconds(1500);  // for ranks that people ask for
constexpr auto kLong = Milliseconds(30'000);          // before people hear of a wait

double in_seconds(Clock::duration time) {
  return std::chrono::duration<double>(std::chrono::ceil<Milliseconds>(time)).count();
}

/// A closed connection is made anew within this where the process lives.
Milliseconds reconnection_time(Milliseconds heartbeat_timeout) {
  return std::max(Milliseconds(500), heartbeat_timeout / 4);
}

std::uint64_t count(Milliseconds time) {
  return static_cast<std::uint64_t>(std::max<Milliseconds::rep>(0, time.count()));
}

bool is_same(const Stuck& a, const Stuck& b) {
  return a.group == b.group && a.sequence == b.sequence;
}

void pack(Packer& to, const Stuck& stuck) {
  to.number(stuck.group).number(stuck.sequence).number(static_cast<std::uint64_t>(stuck.rank));
  to.number(static_cast<std::uint64_t>(stuck.world_size));
  to.number(count(stuck.waited)).number(count(stuck.timeout));
}

Stuck unpack_stuck(Unpacker& from) {
  Stuck stuck;
  stuck.group = from.number();
  stuck.sequence = from.number();
  stuck.rank = static_cast<int>(from.number());
  stuck.world_size = static_cast<int>(from.number());
  stuck.waited = Milliseconds(from.number());
  stuck.timeout = Milliseconds(from.number());
  return stuck;
}

}  // namespace

std::string ControlNode::Report::pack() const {
  Packer to;
  to.number(static_cast<std::uint64_t>(rank)).text(host).text(failure).number(subtree_left);
  to.number(left.size());
  for (const Left& one : left) {
    to.number(one.group).number(static_cast<std::uint64_t>(one.rank)).number(one.started);
  }
  to.number(stuck.size());
  for (const Stuck& one : stuck) parallel::pack(to, one);
  to.number(reached.size());
  for (const GroupProgress& one : reached) {
    to.number(one.group).number(one.started).number(one.ranks).number(one.world_size);
  }
  to.number(status_of).number(statuses.size());
  for (const std::string& one : statuses) to.text(one);
  to.number(answered);
  if (answered != 0) census.pack(to), meetings.pack(to);
  return to.bytes();
}

ControlNode::Report ControlNode::Report::unpack(std::string_view bytes) {
  Unpacker from(bytes);
  Report report;
  report.rank = static_cast<int>(from.number());
  report.host = from.text();
  report.failure = from.text();
  report.subtree_left = from.number() != 0;
  for (std::uint64_t n = from.count(24); n > 0; --n) {
    Left one;
    one.group = from.number();
    one.rank = static_cast<int>(from.number());
    one.started = from.number();
    report.left.push_back(one);
  }
  for (std::uint64_t n = from.count(48); n > 0; --n) report.stuck.push_back(unpack_stuck(from));
  for (std::uint64_t n = from.count(32); n > 0; --n) {
    GroupProgress one;
    one.group = from.number();
    one.started = from.number();
    one.ranks = from.number();
    one.world_size = from.number();
    report.reached.push_back(one);
  }
  report.status_of = from.number();
  for (std::uint64_t n = from.count(8); n > 0; --n) report.statuses.push_back(from.text());
  report.answered = from.number();
  if (report.answered == 0) return report;
  report.census = CollectiveStatus::unpack(from);
  report.meetings = MessageStatus::unpack(from);
  return report;
}

std::string ControlNode::ParentMessage::pack() const {
  return Packer()
      .text(host)
      .text(failure)
      .number(question.id)
      .number(question.group)
      .number(question.sequence)
      .number(heard_left)
      .number(status_asked)
      .bytes();
}

ControlNode::ParentMessage ControlNode::ParentMessage::unpack(std::string_view bytes) {
  Unpacker from(bytes);
  ParentMessage word;
  word.host = from.text();
  word.failure = from.text();
  word.question.id = from.number();
  word.question.group = from.number();
  word.question.sequence = from.number();
  word.heard_left = from.number() != 0;
  word.status_asked = from.number();
  return word;
}

ControlNode::LocalProbes ControlNode::probes_of(std::function<Histories()> histories) {
  /// Of each history, what f(history) gives, if anything.
  const auto each = [histories = std::move(histories)](auto f) {
    std::vector<typename decltype(f(*histories().front()))::value_type> all;
    for (const auto& history : histories()) {
      if (auto one = f(*history)) all.push_back(*std::move(one));
    }
    return all;
  };
  LocalProbes own;
  own.stuck = [each] { return each([](History& h) { return h.under_way(Clock::now()); }); };
  own.reached = [each] { return each([](History& h) { return h.reached(); }); };
  own.standing = [each](std::uint64_t group, std::uint64_t sequence) {
    return each([&](History& h) {
      return h.group() == group ? std::optional(h.standing(sequence)) : std::nullopt;
    });
  };
  own.meetings = [each](std::uint64_t group) {
    return each(
        [&](History& h) { return h.group() == group ? h.meeting(Clock::now()) : std::nullopt; });
  };
  own.warn = [](const std::string& text) { log::warn("{}", text); };
  own.status_asked = core::asked_for_ranks;
  own.status = core::rank_report;
  own.tell_status = core::answer_for_ranks;
  return own;
}

std::vector<int> ControlNode::children_of(int rank, int world_size) {
  std::vector<int> children;
  for (int k = 1; k <= kChildren; ++k) {
    const std::int64_t child = std::int64_t{rank} * kChildren + k;
    if (child < world_size) children.push_back(static_cast<int>(child));
  }
  return children;
}

ControlNode::ControlNode(int rank, int world_size, std::string host, Milliseconds heartbeat_timeout,
                         LocalProbes own, Clock::time_point now)
    : rank_(rank),
      world_size_(world_size),
      host_(std::move(host)),
      heartbeat_timeout_(heartbeat_timeout),
      own_(std::move(own)),
      now_(now),
      next_heartbeat_(now),
      next_question_(now) {
  for (const int child : children_of(rank, world_size)) children_[child].heard = now;
  parent_.heard = now;
}

void ControlNode::adopt(const std::string& reason) {
  if (!failure_.empty()) return;
  failure_ = reason;
  failed_ = now_;
  news_up_ = news_down_ = true;
}

void ControlNode::fail(const std::string& reason) {
  if (reason.empty() || !proposal_.empty()) return;
  proposal_ = reason;
  proposed_ = now_;
  news_up_ = true;
  if (is_root()) adopt(reason);
}

void ControlNode::leave(const Left& left) {
  constexpr std::size_t kMost = 256;  // of short-lived groups
  if (left_groups_.size() == kMost) left_groups_.erase(left_groups_.begin());
  left_groups_.push_back(left);
}

void ControlNode::leave() {
  left_ = true;
  news_up_ = true;
}

bool ControlNode::subtree_left() const {
  return left_ && std::all_of(children_.begin(), children_.end(),
                              [](const auto& child) { return child.second.has_left(); });
}

/// Nobody needs this rank where all have left, or know why the job is broken.
bool ControlNode::may_go() const {
  if (failure_.empty()) return subtree_left() && (is_root() || heard_left_);
  const auto knows = [](const auto& child) {
    const Peer& peer = child.second;
    return peer.has_left() || peer.dead || (peer.last && !peer.last->failure.empty());
  };
  return now_ - failed_ >= kLastWords || std::all_of(children_.begin(), children_.end(), knows);
}

Milliseconds ControlNode::time_to_explain(Milliseconds heartbeat_timeout) {
  constexpr auto kToHear = Milliseconds(2000), kToAnswer = Milliseconds(500);
  const auto questions = MessageStatus::kPatience + static_cast<int>(kMostStuck) * kSoon;
  return std::max<Milliseconds>(heartbeat_timeout + kToHear, questions + kToAnswer);
}

void ControlNode::hear(const Report& report, Clock::time_point now) {
  now_ = now;
  const auto found = children_.find(report.rank);
  if (found == children_.end()) return;
  Peer& child = found->second;
  if (child.has_left() && !report.subtree_left) return;  // from before, over another connection
  const bool left_now = report.subtree_left && !child.has_left();
  const std::size_t before = child.last ? child.last->statuses.size() : 0;
  news_up_ = news_up_ || (report.status_of == status_asked_ && report.statuses.size() > before);
  child = {true, now, std::nullopt, report.host, report, true, false};
  fail(report.failure);
  if (left_now && subtree_left()) news_up_ = true;
  answer();
}

void ControlNode::hear(const ParentMessage& word, Clock::time_point now) {
  now_ = now;
  parent_ = {true, now, std::nullopt, word.host, std::nullopt, false, false};
  if (!word.failure.empty()) adopt(word.failure);
  heard_left_ = heard_left_ || word.heard_left;
  if (status_asked_ != word.status_asked) news_up_ = news_down_ = true;
  status_asked_ = word.status_asked;
  if (word.question.id == question_.id) return;
  question_ = word.question;
  census_.reset();
  news_down_ = true;
  answer();
}

void ControlNode::set_connected(int child, bool connected, Clock::time_point now) {
  Peer& peer = child < 0 ? parent_ : children_.at(child);
  if (connected) {
    peer.closed.reset();
  } else if (!peer.closed) {
    peer.closed = now;
  }
}

/// Adds up the answers, once everybody below has given one.
void ControlNode::answer() {
  if (question_.id == 0 || census_) return;
  const auto waits = [&](const auto& child) {
    const Peer& peer = child.second;
    return !peer.has_left() && (!peer.last || peer.last->answered != question_.id);
  };
  if (std::any_of(children_.begin(), children_.end(), waits)) return;
  const bool pairs = question_.sequence == Stuck::kPair;
  CollectiveStatus census;
  meetings_ = {};
  const auto add_left = [&](const std::vector<Left>& all) {
    for (const Left& left : all) {
      if (left.group != question_.group) continue;
      pairs
          ? meetings_.add(MessageProgress{
                .rank = left.rank, .place = MessageProgress::Place::left, .started = left.started})
          : census.add(left, question_.sequence);
    }
  };
  if (pairs) {
    for (const MessageProgress& own : own_.meetings(question_.group)) meetings_.add(own);
  } else {
    for (const RankProgress& own : own_.standing(question_.group, question_.sequence))
      census.add(own);
  }
  add_left(left_groups_);
  for (const auto& [rank, child] : children_) {
    if (child.has_left()) {
      add_left(child.last->left);
      continue;
    }
    census.add(child.last->census);
    meetings_.add(child.last->meetings);
  }
  census_ = std::move(census);
  news_up_ = true;
}

/// Those that take longer than a moment, the longest first.
std::vector<Stuck> ControlNode::stuck() const {
  std::vector<Stuck> all;
  const auto add = [&](const Stuck& stuck) {
    const auto same = std::find_if(all.begin(), all.end(),
                                   [&](const Stuck& other) { return is_same(stuck, other); });
    if (same == all.end()) {
      all.push_back(stuck);
    } else if (stuck.waited > same->waited) {
      *same = stuck;
    }
  };
  for (const Stuck& own : own_.stuck()) {
    if (own.waited >= std::min(kMoment, own.timeout)) add(own);
  }
  for (const auto& [rank, child] : children_) {
    if (!child.last) continue;
    for (const Stuck& stuck : child.last->stuck) add(stuck);
  }
  std::sort(all.begin(), all.end(),
            [](const Stuck& a, const Stuck& b) { return a.waited > b.waited; });
  if (all.size() > kMostStuck) all.resize(kMostStuck);
  return all;
}

/// Of all groups of which everybody's data is untagged; a few.
std::vector<GroupProgress> ControlNode::reached() const {
  constexpr std::size_t kMost = 8;
  std::map<std::uint64_t, GroupProgress> all;
  const auto add = [&](const GroupProgress& one) {
    const auto [entry, is_new] = all.try_emplace(one.group, one);
    if (is_new) return;
    entry->second.started = std::min(entry->second.started, one.started);
    entry->second.ranks += one.ranks;
  };
  for (const GroupProgress& own : own_.reached()) add(own);
  for (const auto& [rank, child] : children_) {
    if (!child.last) continue;
    for (const GroupProgress& one : child.last->reached) add(one);
  }
  std::vector<GroupProgress> some;
  for (const auto& [group, one] : all) {
    if (some.size() < kMost) some.push_back(one);
  }
  return some;
}

/// Takes the collectives that do not end in turn.
bool ControlNode::choose_stuck() {
  const std::vector<Stuck> all = stuck();
  if (all.empty()) return false;
  const auto last = std::find_if(all.begin(), all.end(),
                                 [&](const Stuck& stuck) { return is_same(stuck, asked_); });
  asked_ = last == all.end() || last + 1 == all.end() ? all.front() : last[1];
  auditing_ = false;
  ask_about(asked_.group, asked_.sequence);
  return true;
}

bool ControlNode::choose_audit() {
  for (const GroupProgress& one : reached()) {
    if (one.ranks != one.world_size || one.started <= audited_[one.group]) continue;
    audited_[one.group] = one.started;
    asked_ = {};
    auditing_ = true;
    ask_about(one.group, one.started - 1);
    return true;
  }
  return false;
}

void ControlNode::ask(Clock::time_point now) {
  if (!choose_stuck() && !choose_audit()) return;
  const bool long_ago = asked_.waited >= MessageStatus::kPatience - kAgain;
  const Milliseconds left = asked_.timeout - asked_.waited, pace = long_ago ? kSoon : kAgain;
  next_question_ = now + (left.count() > 0 ? std::min(left, pace) : pace);
}

void ControlNode::ask_about(std::uint64_t group, std::uint64_t sequence) {
  question_ = {question_.id + 1, group, sequence};
  census_.reset();
  judged_ = false;
  news_down_ = true;
  answer();
}

/// Ranks may pass a collective in which they differ, where each only sends or only queues, and be
/// stuck in a later one, to which not all have to come: the root asks its way back to it.
void ControlNode::judge() {
  judged_ = true;
  if (question_.sequence == Stuck::kPair) {
    fail(meetings_.judge(asked_));
    return warn();
  }
  Stuck about = asked_;
  about.sequence = question_.sequence;
  fail(auditing_ ? census_->disagreement(question_.sequence) : census_->judge(about));
  if (!auditing_ && question_.sequence == asked_.sequence) warn();
  if (!failure_.empty() || question_.sequence == 0 || !census_->may_have_parted()) return;
  ask_about(question_.group, question_.sequence - 1);
}

void ControlNode::warn() {
  if (asked_.waited < kLong || warned_[asked_.group] == asked_.sequence + 1) return;
  warned_[asked_.group] = asked_.sequence + 1;
  const bool pair = asked_.sequence == Stuck::kPair;
  own_.warn(pair ? meetings_.describe(asked_) : census_->describe(asked_));
}

std::vector<std::string> ControlNode::statuses() const {
  std::vector<std::string> all{own_.status()};
  for (const auto& [rank, child] : children_) {
    if (!child.last || child.last->status_of != status_asked_) continue;
    all.insert(all.end(), child.last->statuses.begin(), child.last->statuses.end());
  }
  return all;
}

/// A rank that does not answer, for it is stopped or gone, is not waited for.
void ControlNode::collect_statuses(Clock::time_point now) {
  const std::uint64_t asked = own_.status_asked();
  if (asked != status_asked_) {
    status_asked_ = asked;
    status_since_ = now;
    news_down_ = true;
  }
  if (status_asked_ == 0) return;
  const std::vector<std::string> all = statuses();
  const bool whole = all.size() == static_cast<std::size_t>(world_size_);
  if (!whole && now - status_since_ < kStatusPatience) return;
  own_.tell_status(status_asked_, all);
  status_asked_ = 0;
  news_down_ = true;
}

std::string ControlNode::death(int rank, const Peer& peer, Clock::time_point now) const {
  const auto silence = now - peer.heard;
  const bool gone = peer.closed && now - *peer.closed >= reconnection_time(heartbeat_timeout_) &&
                    silence >= reconnection_time(heartbeat_timeout_);
  // A process may be slow to start, and all have met before this tree was made.
  const auto allowed_silence = peer.known ? heartbeat_timeout_ : 4 * heartbeat_timeout_;
  if (!gone && silence < allowed_silence) return "";
  return core::str(
      "rank ", rank, " died", peer.host.empty() ? "" : " (" + peer.host + ")",
      gone ? ": its connection closed, and it has given" : ": it has given",
      " no sign of life for ", in_seconds(silence), " s",
      gone ? ""
           : core::str(" (GroupOptions::heartbeat_timeout or CAIRN_HEARTBEAT_TIMEOUT is ",
                       in_seconds(heartbeat_timeout_),
                       " s: set more where machines are paused for longer)"));
}

/// What takes long here, or too long, does not wait for a heartbeat to be told.
void ControlNode::notice_own() {
  for (const Stuck& own : own_.stuck()) {
    if (own.waited < std::min(kMoment, own.timeout)) continue;
    const std::pair told{own.sequence + 1, own.waited >= own.timeout};
    news_up_ = news_up_ || told_[own.group] != told;
    told_[own.group] = told;
  }
}

void ControlNode::slept(Clock::duration time) {
  const auto forgive = [&](Peer& peer) {
    peer.heard += time;
    if (peer.closed) *peer.closed += time;
  };
  forgive(parent_);
  for (auto& [rank, child] : children_) forgive(child);
}

void ControlNode::tick(Clock::time_point now) {
  now_ = now;
  notice_own();
  for (auto& [rank, child] : children_) {
    const std::string reason = child.has_left() ? "" : death(rank, child, now);
    child.dead = !reason.empty();
    fail(reason);
  }
  if (is_root()) {
    collect_statuses(now);
    if (!judged_ && census_) judge();
    if (judged_ && now >= next_question_) ask(now);
    return;
  }
  const std::string orphaned = heard_left_ ? "" : death(parent_of(rank_), parent_, now);
  if (subtree_left()) {  // nobody here needs anybody: a parent that is gone had no more to say
    heard_left_ = heard_left_ || !orphaned.empty();
    return;
  }
  fail(orphaned);
  const bool unheard = !proposal_.empty() && now - proposed_ >= heartbeat_timeout_;
  if (!orphaned.empty() || unheard) adopt(proposal_);
}

ControlNode::Report ControlNode::report() const {
  Report report;
  report.rank = rank_;
  report.host = host_;
  report.failure = failure_.empty() ? proposal_ : failure_;
  report.subtree_left = subtree_left();
  report.stuck = stuck();
  report.reached = reached();
  report.status_of = status_asked_;
  if (status_asked_ != 0) report.statuses = statuses();
  if (report.subtree_left) {
    report.left = left_groups_;
    for (const auto& [rank, child] : children_) {
      report.left.insert(report.left.end(), child.last->left.begin(), child.last->left.end());
    }
  }
  if (!census_) return report;
  report.answered = question_.id;
  report.census = *census_;
  report.meetings = meetings_;
  return report;
}

ControlNode::ParentMessage ControlNode::word(const Peer& child) const {
  return {host_, failure_, question_, child.has_left(), status_asked_};
}

Milliseconds ControlNode::heartbeat_interval(Milliseconds heartbeat_timeout) {
  return std::clamp(heartbeat_timeout / 8, Milliseconds(50), Milliseconds(500));
}

std::vector<ControlNode::ControlMessage> ControlNode::take_messages(Clock::time_point now) {
  const Milliseconds interval = heartbeat_interval(heartbeat_timeout_);
  const bool beat = now >= next_heartbeat_;
  if (beat) next_heartbeat_ = now + interval;
  std::vector<ControlMessage> messages;
  if (!is_root() && (beat || news_up_)) messages.push_back({parent_of(rank_), report().pack()});
  for (auto& [rank, child] : children_) {
    // One that is not heard in time is told too: where nobody is there any more, that shows.
    const bool probe = beat && now - child.heard >= 2 * interval;
    if (!child.known || !(news_down_ || child.unanswered || probe)) continue;
    messages.push_back({rank, word(child).pack()});
    child.unanswered = false;
  }
  news_up_ = news_down_ = false;
  return messages;
}

}  // namespace cairn::parallel
