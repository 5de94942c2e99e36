#include "control/message_status.h"

#include <algorithm>
#include <set>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

using Place = MessageProgress::Place;

constexpr std::size_t kNamed = 8;  // ranks whose place is told
constexpr std::size_t kMostNamed = 200;

bool is_pair(const MessageProgress& meeting) {
  return meeting.place == Place::sending || meeting.place == Place::receiving;
}

/// How many messages from `rank` it has begun to receive, or to it to send.
std::uint64_t begun(const MessageProgress& of, int rank, bool sends) {
  const auto found = std::find_if(of.begun.begin(), of.begun.end(), [&](const auto& messages) {
    return messages.peer == rank && messages.sends == sends;
  });
  return found == of.begun.end() ? 0 : found->count;
}

/// Whether one cannot go on before the other has begun something that it has not.
bool waits_for(const MessageProgress& one, const MessageProgress& other) {
  const bool long_ago = one.waited >= MessageStatus::kPatience;
  if (one.place == Place::collective)
    return long_ago && other.place != Place::left && other.started <= one.number;
  if (!is_pair(one) || one.peer != other.rank) return false;
  const bool receives = one.place == Place::receiving;
  if (begun(other, one.rank, receives) > one.number) return false;
  return long_ago || (receives && other.place != Place::left);
}

}  // namespace

void MessageStatus::add(const MessageProgress& meeting) {
  const auto at = std::lower_bound(
      all_.begin(), all_.end(), meeting,
      [](const MessageProgress& a, const MessageProgress& b) { return a.rank < b.rank; });
  if (at != all_.end() && at->rank == meeting.rank) return;
  all_.insert(at, meeting)->what.resize(std::min(meeting.what.size(), kMostNamed));
}

void MessageStatus::add(const MessageStatus& other) {
  for (const MessageProgress& meeting : other.all_) add(meeting);
}

const MessageProgress* MessageStatus::find(int rank) const {
  const auto at = std::lower_bound(all_.begin(), all_.end(), rank,
                                   [](const MessageProgress& a, int b) { return a.rank < b; });
  return at == all_.end() || at->rank != rank ? nullptr : &*at;
}

/// Who waits for whom; the last one for nobody, for somebody among them, or in a collective.
MessageStatus::Path MessageStatus::path_from(const MessageProgress& first) const {
  Path path{&first};
  while (is_pair(*path.back())) {
    const MessageProgress* next = find(path.back()->peer);
    if (next == nullptr || !waits_for(*path.back(), *next)) break;
    if (std::find(path.begin(), path.end(), next) != path.end()) break;
    path.push_back(next);
  }
  return path;
}

std::string MessageStatus::judge(const Path& path) const {
  const MessageProgress& last = *path.back();
  if (last.place == Place::left && path.size() > 1)
    return core::str(name(last.rank), ", but ", name(path[path.size() - 2]->rank));
  const auto first = std::find_if(path.begin(), path.end(), [&](const MessageProgress* meeting) {
    return meeting != &last && waits_for(last, *meeting);
  });
  if (first == path.end()) return "";
  std::string text = "ranks wait for each other: ";
  const auto count = static_cast<std::size_t>(path.end() - first);
  for (std::size_t i = 0; i < std::min(count, kNamed); ++i)
    text += (i == 0 ? "" : "; ") + name(first[static_cast<std::ptrdiff_t>(i)]->rank);
  return count > kNamed ? core::str(text, "; ... (", count, " in all)") : text;
}

std::string MessageStatus::judge(const Stuck& stuck) const {
  std::set<const MessageProgress*> seen;
  for (const MessageProgress& meeting : all_) {
    if (!is_pair(meeting) || seen.contains(&meeting)) continue;
    const Path path = path_from(meeting);
    if (std::string text = judge(path); !text.empty()) return text;
    seen.insert(path.begin(), path.end());
  }
  const MessageProgress* own = find(stuck.rank);
  if (stuck.waited < stuck.timeout || own == nullptr || !is_pair(*own)) return "";
  return core::str(describe(stuck), " (the limit is ",
                   static_cast<double>(stuck.timeout.count()) / 1000.0, " s)");
}

std::string MessageStatus::describe(const Stuck& stuck) const {
  const MessageProgress* own = find(stuck.rank);
  if (own == nullptr || !is_pair(*own)) return core::str("rank ", stuck.rank, " goes on");
  return core::str("rank ", stuck.rank, " has waited ",
                   static_cast<double>(stuck.waited.count()) / 1000.0, " s in ", own->what, "; ",
                   name(own->peer));
}

std::string MessageStatus::name(int rank) const {
  const std::string who = core::str("rank ", rank, ' ');
  const MessageProgress* meeting = find(rank);
  if (meeting == nullptr) return who + "is not in the group";
  switch (meeting->place) {
    case Place::left:
      return core::str(who, "left the group after ", meeting->started, " collectives");
    case Place::outside:
      return core::str(who, "is in none, after ", meeting->started, " collectives");
    case Place::collective:
      return core::str(who, "is in collective ", meeting->number, ", ", meeting->what);
    default:
      return core::str(who, "is in ", meeting->what);
  }
}

void MessageStatus::pack(wire::Packer& to) const {
  to.number(all_.size());
  for (const MessageProgress& one : all_) {
    to.number(static_cast<std::uint64_t>(one.rank)).number(static_cast<std::uint64_t>(one.place));
    to.number(static_cast<std::uint64_t>(one.peer)).number(one.number).number(one.started);
    to.number(static_cast<std::uint64_t>(one.waited.count())).text(one.what);
    to.number(one.begun.size());
    for (const MessageProgress::Messages& messages : one.begun) {
      to.number(static_cast<std::uint64_t>(messages.peer)).number(messages.sends);
      to.number(messages.count);
    }
  }
}

MessageStatus MessageStatus::unpack(wire::Unpacker& from) {
  MessageStatus meetings;
  for (std::uint64_t left = from.count(64); left > 0; --left) {
    MessageProgress one;
    one.rank = static_cast<int>(from.number());
    one.place = static_cast<Place>(from.number());
    one.peer = static_cast<int>(from.number());
    one.number = from.number();
    one.started = from.number();
    one.waited = Milliseconds(from.number());
    one.what = from.text();
    for (std::uint64_t n = from.count(24); n > 0; --n) {
      const int peer = static_cast<int>(from.number());
      const bool sends = from.number() != 0;
      one.begun.push_back({peer, sends, from.number()});
    }
    meetings.add(one);
  }
  return meetings;
}

}  // namespace cairn::parallel
