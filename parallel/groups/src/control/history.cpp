#include "control/history.h"

#include <algorithm>
#include <utility>

namespace cairn::parallel {

namespace {

MessageProgress::Place place_of(const PairMessage& message) {
  return message.sends ? MessageProgress::Place::sending : MessageProgress::Place::receiving;
}

}  // namespace

History::History(std::uint64_t group, int rank, int world_size, std::string name)
    : group_(group), rank_(rank), world_size_(world_size), name_(std::move(name)) {}

std::string History::description(std::uint64_t sequence) const {
  return descriptions_[sequence % kRemembered].text() + name_;
}

void History::begin(std::uint64_t sequence, const Description& description, Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t before = sequence == 0 ? 0 : trails_[(sequence - 1) % kTrails];
  trails_[sequence % kTrails] = parallel::fingerprint(description, before);
  descriptions_[sequence % kRemembered] = description;
  started_ = sequence + 1;
  inside_ = true;
  since_ = Clock::now();
  timeout_ = timeout;
}

PairMessage History::begin_pair(int peer, bool sends, std::string description,
                                Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  auto at = std::find_if(messages_.begin(), messages_.end(), [&](const auto& messages) {
    return messages.peer == peer && messages.sends == sends;
  });
  if (at == messages_.end()) at = messages_.insert(at, {peer, sends, 0});
  const PairMessage message{peer, sends, at->count++};
  pair_ = MessageProgress{rank_, place_of(message),      peer, message.number, 0,
                          {},    std::move(description), {}};
  since_ = Clock::now();
  timeout_ = timeout;
  return message;
}

void History::mark_untagged() {
  const std::lock_guard lock(mutex_);
  untagged_ = true;
}

void History::end() {
  const std::lock_guard lock(mutex_);
  inside_ = false;
  pair_.reset();
}

void History::watch_device(std::function<std::optional<Pending>()> pending) {
  const std::lock_guard lock(mutex_);
  pending_ = std::move(pending);
}

std::optional<Pending> History::pending() const {
  std::unique_lock lock(mutex_);
  const auto ask = pending_;
  lock.unlock();
  return ask ? ask() : std::nullopt;
}

void History::give_up(std::string why) {
  const std::lock_guard lock(mutex_);
  gave_up_ = started_;
  why_ = std::move(why);
}

std::string History::why_given_up() const {
  const std::lock_guard lock(mutex_);
  return gave_up_ == started_ ? why_ : "";
}

void History::leave() {
  const std::lock_guard lock(mutex_);
  left_ = true;
}

void History::slept(Clock::duration time) {
  const std::lock_guard lock(mutex_);
  since_ = std::min(since_ + time, Clock::now());
}

std::optional<Stuck> History::under_way(Clock::time_point now) const {
  const auto pending = this->pending();
  const std::lock_guard lock(mutex_);
  Stuck stuck{group_, started_ - 1, rank_, world_size_, Milliseconds(0), timeout_};
  const auto waits_since = [&](Clock::time_point since) {
    stuck.waited = std::max(stuck.waited, std::chrono::duration_cast<Milliseconds>(now - since));
  };
  const bool on_host = (inside_ || pair_) && !left_, on_device = pending && pending->since;
  if (!on_host && !on_device) return std::nullopt;
  if (on_host) waits_since(since_);
  if (on_device) waits_since(*pending->since), stuck.timeout = pending->timeout;
  if (on_device ? pending->message.has_value() : pair_.has_value()) {
    stuck.sequence = Stuck::kPair;
  } else if (pending && pending->sequence) {
    stuck.sequence = *pending->sequence;
  }
  return stuck;
}

RankProgress History::standing(std::uint64_t sequence) const {
  const auto pending = this->pending();
  const std::lock_guard lock(mutex_);
  RankProgress standing{.rank = rank_, .started = started_};
  standing.gave_up = gave_up_ == std::min(sequence, started_);
  if (sequence >= started_) {
    if (left_) standing.place = RankProgress::Place::left;
    if (standing.gave_up) standing.why = why_;
    if (started_ > 0) standing.description = description(started_ - 1);
    return standing;
  }
  const bool on_device = pending && pending->sequence && sequence >= *pending->sequence;
  const bool current = on_device || (sequence + 1 == started_ && inside_);
  standing.place = current ? RankProgress::Place::inside : RankProgress::Place::done;
  if (on_device && (!pending->since || pending->message))
    standing.place = RankProgress::Place::absent;  // its device is
  const std::uint64_t ago = started_ - sequence;
  if (ago <= kTrails) standing.fingerprint = trails_[sequence % kTrails];
  if (ago <= kRemembered) standing.description = description(sequence);
  return standing;
}

std::optional<MessageProgress> History::meeting(Clock::time_point now) const {
  const auto pending = this->pending();
  const std::lock_guard lock(mutex_);
  if (messages_.size() > kMostPeers) return std::nullopt;
  MessageProgress meeting = on_host(now);
  if (pending) see_device(meeting, *pending, now);
  return meeting;
}

MessageProgress History::on_host(Clock::time_point now) const {
  MessageProgress meeting = pair_.value_or(MessageProgress{});
  meeting.rank = rank_;
  meeting.started = started_;
  meeting.begun = messages_;
  if (inside_ || pair_) meeting.waited = std::chrono::duration_cast<Milliseconds>(now - since_);
  if (left_) meeting.place = MessageProgress::Place::left;
  if (left_ || !inside_) return meeting;
  meeting.place = MessageProgress::Place::collective;
  meeting.number = started_ - 1;
  meeting.what = description(meeting.number);
  return meeting;
}

/// What a device has not come to is not begun, and what it is in is older than what the host is in.
void History::see_device(MessageProgress& meeting, const Pending& pending,
                         Clock::time_point now) const {
  for (const PairMessage& message : pending.to_come) {
    for (MessageProgress::Messages& begun : meeting.begun)
      begun.count -= begun.peer == message.peer && begun.sends == message.sends;
  }
  if (pending.sequence) meeting.started = *pending.sequence;
  if (meeting.place == MessageProgress::Place::left)
    meeting.place = MessageProgress::Place::outside;  // not yet
  if (!pending.since) return;
  meeting.waited = std::chrono::duration_cast<Milliseconds>(now - *pending.since);
  if (pending.message) {
    meeting.place = place_of(*pending.message);
    meeting.peer = pending.message->peer;
    meeting.number = pending.message->number;
    meeting.what = pending.what;
  } else {
    meeting.place = MessageProgress::Place::collective;
    meeting.number = *pending.sequence;
    meeting.started = meeting.number + 1;
    meeting.what = description(meeting.number);
  }
}

std::optional<GroupProgress> History::reached() const {
  const std::lock_guard lock(mutex_);
  if (!untagged_ || left_) return std::nullopt;
  return GroupProgress{group_, started_, 1, static_cast<std::uint64_t>(world_size_)};
}

std::optional<Left> History::left() const {
  const std::lock_guard lock(mutex_);
  if (!left_) return std::nullopt;
  return Left{group_, rank_, started_};
}

}  // namespace cairn::parallel
