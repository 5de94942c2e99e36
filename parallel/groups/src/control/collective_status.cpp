#include "control/collective_status.h"

#include <algorithm>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kLongestText = 400;

std::string seconds(Milliseconds time) {
  return core::str(static_cast<double>(time.count()) / 1000.0, " s");
}

}  // namespace

void CollectiveStatus::Ranks::add(int rank) {
  ++count;
  const auto at = std::lower_bound(lowest.begin(), lowest.end(), rank);
  lowest.insert(at, rank);
  if (lowest.size() > kNamed) lowest.pop_back();
}

void CollectiveStatus::Ranks::add(const Ranks& other) {
  count += other.count;
  std::vector<int> all;
  std::merge(lowest.begin(), lowest.end(), other.lowest.begin(), other.lowest.end(),
             std::back_inserter(all));
  if (all.size() > kNamed) all.resize(kNamed);
  lowest = std::move(all);
}

std::string CollectiveStatus::Ranks::text() const {
  std::string text = count == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < lowest.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(lowest[i]);
  }
  if (count > lowest.size()) text += core::str(", ... (", count, " in all)");
  return text;
}

void CollectiveStatus::add_kind(const CollectiveGroup& kind) {
  const auto at = std::lower_bound(kinds_.begin(), kinds_.end(), kind,
                                   [](const CollectiveGroup& a, const CollectiveGroup& b) {
                                     return a.fingerprint < b.fingerprint;
                                   });
  if (at != kinds_.end() && at->fingerprint == kind.fingerprint) {
    if (at->description.empty()) at->description = kind.description;  // some have forgotten it
    return at->ranks.add(kind.ranks);
  }
  kinds_.insert(at, kind);
  if (kinds_.size() > kNamed) kinds_.pop_back();
}

/// Before the ranks are added to gave_up_, whose lowest tells why.
void CollectiveStatus::add_gave_up(const Ranks& ranks, const std::string& why) {
  if (ranks.count == 0) return;
  if (gave_up_.count == 0 || ranks.lowest.front() < gave_up_.lowest.front()) why_ = why;
  gave_up_.add(ranks);
}

void CollectiveStatus::add(const RankProgress& standing) {
  switch (standing.place) {
    case RankProgress::Place::absent:
      if (standing.gave_up) {
        add_gave_up({1, {standing.rank}}, standing.why.substr(0, kLongestText));
      }
      absent_.add(standing.rank);
      break;
    case RankProgress::Place::left:
      if (left_.lowest.empty() || standing.rank < left_.lowest.front()) {
        left_after_ = standing.started;
      }
      return left_.add(standing.rank);
    case RankProgress::Place::inside:
      if (!standing.gave_up) went_on_.add(standing.rank);
      inside_.add(standing.rank);
      break;
    case RankProgress::Place::done:
      done_.add(standing.rank);
      break;
  }
  if (standing.fingerprint == 0) return;
  CollectiveGroup kind{standing.fingerprint, {}, standing.description.substr(0, kLongestText)};
  kind.ranks.add(standing.rank);
  add_kind(kind);
}

void CollectiveStatus::add(const Left& left, std::uint64_t sequence) {
  const bool needed = sequence >= left.started;
  add(RankProgress{.rank = left.rank,
                   .place = needed ? RankProgress::Place::left : RankProgress::Place::done,
                   .started = left.started});
}

void CollectiveStatus::add(const CollectiveStatus& other) {
  const auto& theirs = other.left_.lowest;
  if (!theirs.empty() && (left_.lowest.empty() || theirs.front() < left_.lowest.front())) {
    left_after_ = other.left_after_;
  }
  add_gave_up(other.gave_up_, other.why_);
  went_on_.add(other.went_on_);
  absent_.add(other.absent_);
  left_.add(other.left_);
  inside_.add(other.inside_);
  done_.add(other.done_);
  for (const CollectiveGroup& kind : other.kinds_) add_kind(kind);
}

std::string CollectiveStatus::name(const Stuck& stuck) const {
  return core::str("collective ", stuck.sequence, kinds_.empty() ? "" : ", ",
                   kinds_.empty() ? "" : kinds_.front().description);
}

std::string CollectiveStatus::describe(const Stuck& stuck) const {
  const bool waits = absent_.count > 0 || counted() < static_cast<std::uint64_t>(stuck.world_size);
  const std::string whom = absent_.count > 0
                               ? absent_.text()
                               : core::str(static_cast<std::uint64_t>(stuck.world_size) - counted(),
                                           " ranks that have not made the group");
  return waits ? core::str("rank ", stuck.rank, " has waited ", seconds(stuck.waited), " for ",
                           whom, " in ", name(stuck))
               : core::str(inside_.text(), " have been in ", name(stuck), " for ",
                           seconds(stuck.waited), "; every rank has come");
}

bool CollectiveStatus::parted_before() const {
  const auto same = [&](const CollectiveGroup& kind) {
    return !kind.description.empty() && kind.description == kinds_.front().description;
  };
  return kinds_.size() > 1 && std::all_of(kinds_.begin(), kinds_.end(), same);
}

std::string CollectiveStatus::disagreement(std::uint64_t sequence) const {
  if (kinds_.size() < 2 || parted_before()) return "";
  std::vector<CollectiveGroup> kinds = kinds_;
  std::sort(kinds.begin(), kinds.end(), [](const CollectiveGroup& a, const CollectiveGroup& b) {
    return a.ranks.lowest.front() < b.ranks.lowest.front();
  });
  auto other = std::find_if(kinds.begin(), kinds.end(), [&](const CollectiveGroup& kind) {
    return kind.description != kinds.front().description;
  });
  if (other == kinds.end()) {
    return core::str("ranks disagree on a collective before ", sequence,
                     ", longer ago than they remember: ", kinds[0].ranks.text(), " and ",
                     kinds[1].ranks.text(), " called different ones");
  }
  const auto calls = [](const CollectiveGroup& kind) {
    return core::str(kind.ranks.text(), kind.ranks.count == 1 ? " calls " : " call ",
                     kind.description.empty() ? "one it has forgotten" : kind.description);
  };
  return core::str("ranks disagree on collective ", sequence, ": ", calls(kinds[0]), "; ",
                   calls(*other));
}

std::string CollectiveStatus::judge(const Stuck& stuck) const {
  if (std::string text = disagreement(stuck.sequence); !text.empty()) return text;
  if (inside_.count == 0) return "";  // it has ended meanwhile
  if (left_.count > 0) {
    return core::str("rank ", left_.lowest.front(), " left the group after ", left_after_,
                     " collectives, but rank ", stuck.rank, " needs it for ", name(stuck));
  }
  if (gave_up_.count > 0 && went_on_.count > 0) {
    return core::str("rank ", gave_up_.lowest.front(), " gave up: ", why_, "; ", went_on_.text(),
                     went_on_.count == 1 ? " waits" : " wait", " for it in ", name(stuck));
  }
  if (stuck.waited < stuck.timeout) return "";
  const std::uint64_t unknown = static_cast<std::uint64_t>(stuck.world_size) - counted();
  if (absent_.count > 0 || unknown > 0) {
    return core::str(absent_.count > 0 ? absent_.text() : core::str(unknown, " ranks"),
                     " did not come to ", name(stuck), ", within ", seconds(stuck.timeout),
                     " of rank ", stuck.rank);
  }
  return core::str(name(stuck), ", did not end within ", seconds(stuck.timeout), " on ",
                   inside_.text(), ", though every rank came");
}

namespace {
// Private types are packed through templates, so that they stay private.
template <class Ranks>
void pack_ranks(wire::Packer& to, const Ranks& ranks) {
  to.number(ranks.count).number(ranks.lowest.size());
  for (const int rank : ranks.lowest) to.number(static_cast<std::uint64_t>(rank));
}
template <class Ranks>
void unpack_ranks(wire::Unpacker& from, Ranks& ranks) {
  ranks.count = from.number();
  for (std::uint64_t left = from.count(8); left > 0; --left) {
    ranks.lowest.push_back(static_cast<int>(from.number()));
  }
}
}  // namespace

void CollectiveStatus::pack(wire::Packer& to) const {
  for (const Ranks* ranks : {&absent_, &left_, &inside_, &done_, &gave_up_, &went_on_}) {
    pack_ranks(to, *ranks);
  }
  to.number(left_after_).text(why_).number(kinds_.size());
  for (const CollectiveGroup& kind : kinds_) {
    to.number(kind.fingerprint).text(kind.description);
    pack_ranks(to, kind.ranks);
  }
}

CollectiveStatus CollectiveStatus::unpack(wire::Unpacker& from) {
  CollectiveStatus census;
  for (Ranks* ranks : {&census.absent_, &census.left_, &census.inside_, &census.done_,
                       &census.gave_up_, &census.went_on_}) {
    unpack_ranks(from, *ranks);
  }
  census.left_after_ = from.number();
  census.why_ = from.text();
  for (std::uint64_t left = from.count(32); left > 0; --left) {
    CollectiveGroup kind;
    kind.fingerprint = from.number();
    kind.description = from.text();
    unpack_ranks(from, kind.ranks);
    if (kind.ranks.lowest.empty())
      core::fail<core::CommunicationError>("store", "got an empty kind");
    census.kinds_.push_back(std::move(kind));
  }
  return census;
}

}  // namespace cairn::parallel
